"""Planners and group shapers in a simulated mesh: its leader takes the path of the real one, with all invariants on."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

import pytest

from rollmesh.curriculum.planners import Round, RoundRules
from rollmesh.curriculum.samplers import PromptSampler, domain_mix
from rollmesh.curriculum.shapers import Closing
from rollmesh.errors import ConfigError
from rollmesh.prompt_history import domain_record
from rollmesh.sim.arms import arms_of
from rollmesh.sim.invariants import InvariantBroken, Invariants
from rollmesh.sim.prompts import DomainRows, SimulatedDraws, parse_domains
from rollmesh.sim.queue_model import QueueModel, Save
from rollmesh.sim.simulated_mesh import SimulatedMesh

from .meshes import assert_conserved, mesh_settings, run

FAILURES = ("deaths_per_hour=200", "back_seconds=3", "trainer_crashes_per_hour=200", "leader_gaps_per_hour=200")


@dataclass(frozen=True)
class UntilSolved:
    """Rounds of two until an answer is right; each launches one more than it needs."""

    def first(self, seen, group_size):
        return Round(needed=2, launched=3)

    def next(self, group):
        scored = len(group.members)
        if any(member.outcome > 0 for member in group.members):
            return None
        return Round(needed=scored + 2, launched=3)


def half(group, records):
    """Keep half of every answer."""
    return Closing(
        shaped_rewards=tuple(m.shaped_reward - m.member_index / 8 for m in group.members),
        kept_tokens=tuple(-(-m.token_count // 2) for m in group.members),
    )


def planned(preset="copris", **options):
    settings = mesh_settings(preset, **options)
    rules = RoundRules(
        planner=UntilSolved(),
        shaper=half,
        planner_name="tests:until_solved",
        group_size=settings.schedule.group_size,
        spare_members=0,
        most_members=12,
    )
    limits = replace(settings.limits, has_rounds=True, keeps_history=True, most_members=12)
    return replace(settings, rounds=rules, limits=limits)


@pytest.mark.parametrize("preset", ["copris", "sync", "copris_paper", "pipeline"])
def test_groups_of_several_rounds_are_trained_and_conserve_work(preset):
    mesh, result = run(planned(preset, failures=FAILURES))
    assert [update.train_step for update in result.updates] == [1, 2, 3, 4, 5, 6]
    assert mesh.queue.totals["groups_extended_total"] > 0
    assert {"surplus", "shortened"} <= result.wasted_tokens.keys()
    assert_conserved(mesh, result)


def test_groups_that_begin_again_conserve_work_with_rounds():
    mesh, result = run(planned("sorted", harvest="group", group_size=4, groups_per_batch=4))
    assert len(result.updates) == 6
    assert mesh.queue.totals["groups_restarted_total"] > 0
    assert_conserved(mesh, result)


def test_the_bound_on_members_holds_for_a_planner_that_never_closes():
    launched = []

    class Endless(UntilSolved):
        def next(self, group):
            launched.append(group.launched)
            return Round(needed=len(group.members) + 3, launched=3)

    settings = planned()
    _, result = run(replace(settings, rounds=replace(settings.rounds, planner=Endless())))
    assert len(result.updates) == 6
    assert max(launched) == 12


def test_an_undecided_group_with_an_unfinished_member_is_found():
    settings = planned()
    queue = QueueModel(settings.limits)
    queue.announce(0)
    queue.set_desired(replace(queue.desired, pool_size=4))
    queue.open_session("worker")
    group = queue.admit("e0-0", 2, plan="{}")
    for member in queue.lease("worker", 2):
        queue.finish("worker", member.trajectory_id, Save(5, 0))
        queue.score("worker", member.trajectory_id, float(member.number))
    Invariants(settings.schedule, queue).whole_queue()
    queue.add_member(group)
    with pytest.raises(InvariantBroken, match=r"undecided group e0-0: open, unfinished members \['e0-0.2'\]"):
        Invariants(settings.schedule, queue).whole_queue()


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
