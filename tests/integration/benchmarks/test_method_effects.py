"""Traces of every kind of method in a run, and none for a method that did nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.method_effects import NO_EFFECT, Traces, effect_of, read_traces
from benchmarks.workloads import group_of, scored
from rollmesh.cli.configuration import method_settings
from rollmesh.config.recipes import resolve_model
from rollmesh.tasks.sources.source_protocol import build_prompt_source
from rollmesh.text import Tokenizer
from rollmesh.types import FinishReason, Group, Prompt, Segment, Trajectory

from ..report.made_run import make_run

SIZE = 8


@pytest.fixture
def traces(tmp_path: Path) -> Traces:
    """A run of 3 updates and two groups of 8 in the order of the source; nothing has left a trace."""
    found = read_traces(make_run(tmp_path / "run", steps=3))
    assert found.run.config is not None
    config = found.run.config
    source = build_prompt_source(config.data, Tokenizer(resolve_model(config.model.path)), config.seed)
    groups = tuple(made_group(f"e0-{i}", source.prompt(0, i)) for i in range(2))
    summary = replace(found.summary, rollouts_per_group={SIZE: 2}, masked_tokens={}, mean_rate_factor=None)
    assert effect_of(replace(found, records=()), "loss/tis") == "", "a run without a step"
    return replace(found, summary=summary, groups=groups)


def made_group(group_id: str, prompt: Prompt) -> Group:
    segment = Segment(
        token_ids=np.arange(6, dtype=np.int32),
        behavior_logprobs=np.zeros(6, np.float32),
        policy_version=0,
        kv_min_version=0,
    )
    return group_of(1, (scored(prompt, group_id, i, (segment,), float(i % 2)) for i in range(SIZE)))


def of_members(traces: Traces, change: Callable[[Trajectory], Trajectory]) -> Traces:
    """Change the first member of every group."""
    changed = tuple(replace(g, trajectories=(change(g.trajectories[0]), *g.trajectories[1:])) for g in traces.groups)
    return replace(traces, groups=changed)


QUIET = ("sampler", "planner", "group_shaper", "token_budget", "masks", "replay", "update_scale")


@pytest.mark.parametrize("point", QUIET)
def test_a_method_without_a_trace_has_no_effect(traces: Traces, point: str) -> None:
    without = replace(traces, summary=replace(traces.summary, replayed_share=None))
    assert effect_of(without, f"{point}/any") == NO_EFFECT


SUMMARIES = [
    ("planner/dars", {"rollouts_per_group": {8: 1, 32: 1}, "rounds_per_group": 1.5}, "8 to 32 rollouts a group, 1.50"),
    (
        "planner/quorum",
        {"rollouts_per_group": {7: 2}, "surplus_tokens": 1234},
        "7 rollouts a group, 1,234 surplus",
    ),
    ("masks/m2po", {"masked_tokens": {"stale": 2, "m2po": 1511}}, "m2po masked 1,511 tokens"),
    ("masks/m2po", {"masked_tokens": {"stale": 2}}, NO_EFFECT),
    ("update_scale/ess", {"mean_rate_factor": 0.95}, "rate times 0.950"),
    ("replay/uniform", {"replayed_share": 0.5}, "50.0% of the trajectories replayed"),
    ("advantage/pairs", {"skipped_trajectories": 56}, "56 trajectories skipped"),
    (
        "sampler/domain_mix",
        {"domains": {"long": {"completed": 1}, "short": {"completed": 3}}},
        "completed long 25.0% short 75.0%",
    ),
]


@pytest.mark.parametrize(("method", "changes", "effect"), SUMMARIES)
def test_totals_of_the_run_are_traces(traces: Traces, method: str, changes: dict[str, Any], effect: str) -> None:
    assert effect in effect_of(replace(traces, summary=replace(traces.summary, **changes)), method)


def test_prompts_of_other_positions_are_the_traces_of_a_sampler(traces: Traces) -> None:
    first, second = traces.groups
    swapped = [made_group(a.group_id, b.trajectories[0].prompt) for a, b in ((first, second), (second, first))]
    assert effect_of(replace(traces, groups=tuple(swapped)), "sampler/band") == (
        "2 of 2 groups have another prompt than in order"
    )


def test_rewards_that_differ_from_the_outcomes_are_the_traces_of_a_group_shaper(traces: Traces) -> None:
    shaped = of_members(traces, lambda t: replace(t, shaped_reward=-0.25, cut_token_count=7))
    assert effect_of(shaped, "group_shaper/dot") == "2 of 16 rewards differ from the outcome, 14 tokens left out"


def test_answers_that_end_below_the_limit_are_the_traces_of_a_budget(traces: Traces) -> None:
    cut = of_members(traces, lambda t: replace(t, finish_reason=FinishReason.LENGTH))
    assert effect_of(cut, "token_budget/stair") == "2 of 16 answers ended at 6 tokens"


@pytest.mark.parametrize(
    ("method", "name", "values", "effect"),
    [
        ("advantage/grpo", "batch.advantage_abs_mean", (0.25, 0.75, 0.5), "mean size 0.500"),
        ("advantage/grpo", "batch.advantage_abs_mean", (0.0, 0.0, 0.0), NO_EFFECT),
        ("loss/tis", "grad_norm", (1.0, 2.0, 3.0), "mean gradient norm 2"),
        ("loss/tis", "grad_norm", (0.0, 0.0, 0.0), NO_EFFECT),
        ("old_logprobs/ewma", "policy.ratio.std", (0.0, 0.5, 0.25), "mean deviation of the ratio 0.25"),
    ],
)
def test_step_reports_are_traces(traces: Traces, method: str, name: str, values: Sequence[float], effect: str) -> None:
    records = []
    for value in values:
        record: Any = value
        for key in reversed(name.split(".")):
            record = {key: record}
        records.append(record)
    assert effect_of(replace(traces, records=tuple(records)), method) == effect


def test_every_method_of_the_demo_has_a_kind_of_trace(traces: Traces) -> None:
    assert all(effect_of(traces, method) for method in method_settings())
