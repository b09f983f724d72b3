"""Trial of an algorithm with a user's code: advantages, masks and loss of one small batch, with a gradient."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from rollmesh.algorithms.old_logprobs import OldLogprobs
from rollmesh.config import RunConfig
from rollmesh.trainer.learner.distributed import pick_device
from rollmesh.trainer.learner.method_binding import bind_advantage, bind_masks, loss_recipe, step_recipe
from rollmesh.trainer.learner.train_batch import build_train_batch, trajectory_columns
from rollmesh.trainer.learner.train_step import apply_masks, token_columns
from rollmesh.types import Batch, FinishReason, Group, OutcomeKind, Prompt, RewardOutcome, Segment, Trajectory
from rollmesh.user_code import own_code


def try_algorithm(config: RunConfig) -> None:
    """Train on nothing: compute what a step computes of two groups. Raises ConfigError or DataError with its field."""
    algorithm = step_recipe(config.trainer, None).algorithm
    advantage, masks, recipe = bind_advantage(algorithm), bind_masks(algorithm), loss_recipe(algorithm)
    random = np.random.default_rng(0)
    size = config.schedule.group_size
    members = [tuple(_trajectory(group, member, random) for member in range(size)) for group in range(2)]
    groups = [Group(group_id=f"trial-{g}", admission_index=g, trajectories=made) for g, made in enumerate(members)]
    flat = build_train_batch(Batch(train_step=1, groups=tuple(groups)), {0: 0}, None)
    policy = np.where(flat.policy_mask, flat.behavior_logprobs + random.normal(0, 0.05, len(flat.token_ids)), 0.0)
    sums = trajectory_columns(
        flat,
        policy=policy if advantage.needs_policy else None,
        reference=policy if advantage.needs_reference else None,
    )
    flat = replace(flat, advantages=advantage.compute(sums).numpy())
    scored = advantage.needs_policy or any(mask.needs_policy for mask in masks)
    old = torch.from_numpy(flat.behavior_logprobs.astype(np.float64))
    flat = apply_masks(flat, masks, old, policy if scored else None, np.abs(policy) if scored else None)
    none = torch.zeros(len(old), dtype=torch.bool)
    columns = token_columns(flat, OldLogprobs(values=old, from_trainer=none, fell_back={}), torch.zeros_like(old), None)
    rows = torch.from_numpy(np.flatnonzero(flat.policy_mask))
    logprobs = torch.from_numpy(policy)[rows].to(pick_device(config.trainer.device), torch.float32).requires_grad_()
    sequences = columns.sequence_index[rows].to(logprobs.device)
    data = columns.loss_input(logprobs, rows, sequences, flat.trajectory_count)
    loss = recipe.loss(data, recipe.options).loss
    with own_code(f"trainer.algorithm.loss={algorithm.loss}: its gradient"):
        torch.autograd.backward(loss.sum())


def _trajectory(group: int, member: int, random: np.random.Generator) -> Trajectory:
    count = 2 + (group + member) % 3
    logprobs = random.uniform(-3.0, -0.1, count).astype(np.float32)
    tokens = np.arange(count, dtype=np.int32)
    reward = float((group + member) % 2)
    return Trajectory(
        trajectory_id=f"trial-{group}-{member}",
        group_id=f"trial-{group}",
        member_index=member,
        prompt=Prompt(prompt_id="trial", token_ids=np.arange(3, dtype=np.int32), verifier=""),
        segments=(Segment(token_ids=tokens, behavior_logprobs=logprobs, policy_version=0, kv_min_version=0),),
        finish_reason=FinishReason.LENGTH if member % 4 == 3 else FinishReason.STOP,
        outcome=RewardOutcome(kind=OutcomeKind.SCORED, value=reward),
        shaped_reward=reward,
    )
