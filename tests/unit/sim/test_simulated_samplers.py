"""Samplers in simulated meshes: the functions of the mesh, and domains whose lengths differ."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from rollmesh.curriculum.samplers import PromptSampler, domain_mix
from rollmesh.errors import ConfigError
from rollmesh.prompt_history import domain_record
from rollmesh.sim.arms import arms_of
from rollmesh.sim.prompts import DomainRows, SimulatedDraws, parse_domains
from rollmesh.sim.queue_model import QueueModel
from rollmesh.sim.simulated_mesh import SimulatedMesh

from .meshes import mesh_settings

DOMAINS = parse_domains("short:0.5:0.2,long:0.5:2")
"""Lengths that differ tenfold."""


def mesh(steps: int, sampler: PromptSampler | None, seed: int = 0, check: bool = True) -> SimulatedMesh:
    settings = mesh_settings(steps=steps, rollout={"max_new_tokens": 15_000}, generator={"max_context_tokens": 16_384})
    prompts = replace(settings.prompts, count=400, domains=DomainRows(DOMAINS, 400))
    prompts = replace(prompts, lengths=replace(prompts.lengths, cap=15_000))
    limits = replace(settings.limits, keeps_history=True)
    fleet = replace(settings.fleet, cache_tokens=200_000)
    return SimulatedMesh(
        replace(settings, prompts=prompts, limits=limits, fleet=fleet, sampler=sampler, seed=seed), check=check
    )


def completed_shares(simulation: SimulatedMesh) -> dict[str, float]:
    records = simulation.queue.history.records
    members = {domain.name: records[domain_record(domain.name)].members for domain in DOMAINS}
    return {name: count / sum(members.values()) for name, count in members.items()}


@pytest.mark.parametrize("seed", [0])
def test_completed_shares_follow_the_targets_though_lengths_differ_tenfold(seed: int) -> None:
    targets = {"short": 0.3, "long": 0.7}
    mix = PromptSampler(name="domain_mix", function=partial(domain_mix, targets=targets, least_completed=50))
    simulation = mesh(500, mix, seed, check=False)
    simulation.run()
    records = simulation.queue.history.records
    assert sum(records[domain_record(domain.name)].groups for domain in DOMAINS) >= 2000
    assert completed_shares(simulation) == pytest.approx(targets, abs=0.02)


def test_the_leader_draws_what_its_sampler_chooses() -> None:
    rows: list[int] = []

    def choose(draw, prompts, history, train_step) -> int:
        rows.append((draw.index + 7) % prompts.row_count)
        return rows[-1]

    simulation = mesh(5, PromptSampler(name="seventh", function=choose))
    simulation.run()
    drawn = {name for name in simulation.queue.history.records if name.startswith("p")}
    assert drawn <= {f"p{row}" for row in rows} and len(rows) >= 20


@pytest.mark.parametrize("text", ["math", "math:0.5", "math:x:1", "math:0.5:1,code:0.4:1", "math:1:0"])
def test_impossible_domains_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="domains"):
        parse_domains(text)


_PUZZLES = "source: {type: countdown}"
PARTS = f"{{type: mixture, parts: [{{name: a, weight: 0.75, {_PUZZLES}}}, {{name: b, weight: 0.25, {_PUZZLES}}}]}}"
FIELD = "data={source: {type: jsonl, path: rows.jsonl}, domain_field: subject, max_prompt_tokens: 512}"


@pytest.mark.parametrize(
    "overrides",
    [
        [f"data.source={PARTS}", "curriculum.sampler=domain_mix"],
        [FIELD, "curriculum={sampler: domain_mix, sampler_options: {targets: {a: 0.75, b: 0.25}}}"],
    ],
)
def test_the_domains_of_the_run_file_need_no_setting_of_the_simulation(overrides: list[str]) -> None:
    (arm,) = arms_of(None, ["trainer.train_steps=1", *overrides], [], [])
    simulation = SimulatedMesh(arm.settings)
    simulation.run()
    groups = {name: simulation.queue.history.records[domain_record(name)].groups for name in "ab"}
    assert groups["a"] / groups["b"] == pytest.approx(3, rel=0.5)


def test_evicted_groups_count_as_draws_of_their_prompts() -> None:
    """Every group is evicted; each prompt is drawn three times before one is drawn a fourth time."""
    settings = mesh_settings()
    prompts = replace(settings.prompts, count=10, domains=DomainRows(parse_domains("a:1:1"), 10))
    mix = PromptSampler(name="domain_mix", function=partial(domain_mix, targets={"a": 1.0}, least_completed=50))
    queue = QueueModel(replace(settings.limits, keeps_history=True))
    draws = SimulatedDraws(prompts, mix, queue, seed=0)
    drawn = Counter[int]()
    for position in range(30):
        draws.refresh()
        row = draws.row(position)
        drawn[row] += 1
        queue.admit(f"e0-{position}", 4, prompt_id=f"p{row}", domain="a")
        assert queue.evict([f"e0-{position}"], "straggler") == 1
    assert drawn == dict.fromkeys(range(10), 3)
