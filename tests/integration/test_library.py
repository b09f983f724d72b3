"""The library: the example of the loop on one page learns, and its parts work alone."""

import runpy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollmesh.api import (
    LossInput,
    Schedule,
    advantages,
    build_verifier,
    decide,
    given_answer,
    load_learner,
    load_run_config,
    loss,
    score,
    simulate,
    train,
)
from rollmesh.scheduling import run_limits
from rollmesh.sim.queue_model import QueueModel
from rollmesh.sim.simulation_setup import DEFAULT_RUN
from rollmesh.tasks.verifiers.verifier_protocol import RewardParts

from ..kit.chat_tokenizers import make_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_example_on_one_page_learns() -> None:
    rewards = runpy.run_path(str(EXAMPLES / "one_page.py"))["main"](16)
    assert len(rewards) == 16
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.05


def test_rewards_are_those_of_a_run_for_a_thought_and_for_a_function_that_needs_the_prompt(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    response = tokenizer.encode("<think>\\boxed{7}</think> The answer is $5$.").tolist()
    group = given_answer(tokenizer.encode("2 + 3?").tolist(), response, [-1.0] * len(response), 0.0)
    (answer,) = group.trajectories

    def rewarded(verify: Callable[..., float | RewardParts], reference: str) -> float | None:
        prompt = replace(answer.prompt, metadata={"answer": reference})
        (scored,) = score([replace(group, trajectories=(replace(answer, prompt=prompt),))], verify, tokenizer)
        return scored.trajectories[0].shaped_reward

    verify = build_verifier("math", {}).verify
    assert (rewarded(verify, "7"), rewarded(verify, "5")) == (0.0, 1.0)

    def prompt_length(response: str, metadata: Mapping[str, Any]) -> float:
        return float(len(metadata["prompt"]))

    prompt_length.needs_prompt = True  # type: ignore[attr-defined]
    assert rewarded(prompt_length, "5") == len("2 + 3?")


def test_a_learner_alone_takes_tokens_logprobs_and_advantages() -> None:
    learner = load_learner(
        "recipe:countdown",
        learning_rate=1e-3,
        algorithm={"advantage": "rollmesh.api:given_advantage", "loss": "tis", "old_logprobs": "recompute"},
    )
    good, bad = [1, 2, 3, 4], [1, 2, 5, 6]

    def probability(ids: list[int]) -> float:
        return float(learner.logprobs([np.array(ids, np.int32)])[0][1:].sum())

    before = probability(good) - probability(bad)
    logprobs = [-2.0, -2.5]
    groups = [given_answer(good[:2], good[2:], logprobs, 1.0), given_answer(bad[:2], bad[2:], logprobs, -1.0)]
    report = train(learner, groups)
    assert (report.train_step, report.batch.trained_tokens, report.updates) == (1, 4, 1)
    assert report.policy.ratio.truncated >= 0
    assert probability(good) - probability(bad) > before


def test_an_advantage_and_a_loss_alone() -> None:
    groups = [given_answer([1], [2, 3], [-1.0, -1.0], reward) for reward in (1.0, 0.0)]
    pair = [
        groups[0].__class__(group_id="g", admission_index=0, trajectories=sum((g.trajectories for g in groups), ()))
    ]
    assert advantages(pair, "dr_grpo").tolist() == [0.5, -0.5]
    logprobs = torch.log(torch.tensor([1.5, 0.5])).requires_grad_()
    zeros = torch.zeros(2)
    data = LossInput(
        logprobs=logprobs,
        old_logprobs=zeros,
        behavior_logprobs=zeros,
        advantages=torch.tensor([1.0, 1.0]),
        mask=torch.ones(2, dtype=torch.bool),
        sequence_index=torch.zeros(2, dtype=torch.int64),
        sequence_count=1,
    )
    # The ratio 1.5 is above the bound 1.2: no gradient; 0.5 is below none.
    assert loss(data, "ppo_clip", clip_high=0.2).weight.tolist() == pytest.approx([0.0, 0.5])


def test_the_scheduler_and_the_simulator_alone() -> None:
    config = load_run_config(DEFAULT_RUN, ["trainer.train_steps=6"])
    schedule, queue = Schedule.from_config(config), QueueModel(run_limits(config))
    queue.announce(0)
    admitted = decide(schedule, queue.view()).admit_groups
    assert 0 < admitted <= schedule.window_groups
    assert simulate(config, trainer_devices=4).updates > 0
