"""Trial of an algorithm with a user's code: advantages, masks and loss of one small batch, with a gradient."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from rollmesh.algorithms.ratios import OldLogprobs
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
    flat = build_train_batch(trial_batch(2, size, random, lambda at: 2 + at % 3), {0: 0}, None)
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


def trial_batch(
    groups: int, members: int, random: np.random.Generator, length: Callable[[int], int], vocabulary: int = 64
) -> Batch:
    """Return groups of random answers with ``length`` tokens each, of group plus member; rewards of 0 and 1."""

    def member(group: int, index: int) -> Trajectory:
        count, reward = length(group + index), float((group + index) % 2)
        segment = Segment(
            token_ids=random.integers(0, vocabulary, count).astype(np.int32),
            behavior_logprobs=random.uniform(-3.0, -0.1, count).astype(np.float32),
            policy_version=0,
            kv_min_version=0,
        )
        return Trajectory(
            trajectory_id=f"trial-{group}-{index}",
            group_id=f"trial-{group}",
            member_index=index,
            prompt=Prompt(prompt_id="trial", token_ids=np.arange(3, dtype=np.int32), verifier=""),
            segments=(segment,),
            finish_reason=FinishReason.LENGTH if index % 4 == 3 else FinishReason.STOP,
            outcome=RewardOutcome(kind=OutcomeKind.SCORED, value=reward),
            shaped_reward=reward,
        )

    made = (tuple(member(at, index) for index in range(members)) for at in range(groups))
    every = (Group(group_id=f"trial-{at}", admission_index=at, trajectories=each) for at, each in enumerate(made))
    return Batch(train_step=1, groups=tuple(every))
