"""Generator of ``docs/simulated-pools.md``: simulated pools and switches of ``copris``, the median of three seeds."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rollmesh.file_writes import write_text
from rollmesh.sim.arms import Arm, arms_of
from rollmesh.sim.figures import Figures, figures
from rollmesh.sim.simulated_mesh import SimulatedMesh
from rollmesh.sim.simulation_setup import SimulationSetup

DOCUMENT = "simulated-pools.md"
Results = Mapping[tuple[str, str], Sequence[Figures]]
"""Figures of the seeds by setup and row: a pool, or a switch."""
POOL_RATIOS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
"""N' / (B n)."""
PLAIN_RATIO = 1.5
"""Most of the automatic pool of the preset; the switches are compared with a fixed pool of it."""
SEEDS = (0, 1, 2)
SWITCHES: Mapping[str, str] = {
    "automatic pool": "schedule.pool_size=auto",
    "longest first": "schedule.start_order=longest_expected",
    "resume most tokens": "schedule.resume_order=most_tokens",
    "resume nearest end": "schedule.resume_order=nearest_end",
    "placement by tokens": "rollout.placement=tokens",
    "every 2nd version": "generator.reload_every_versions=2",
    "every 4th version": "generator.reload_every_versions=4",
}
"""Field of the run file by switch."""
GENERATORS = 4
REPEAT_UPDATES = 5
"""Updates after which a prompt comes again, as ``longest_expected`` needs."""
_GROUPS, _MEMBERS = 32, 8
_TEXT = """\
<!-- Generated: make sim-recommend -->
# Simulated pools and switches

`make sim-recommend` simulates `copris` at each setup below and writes this file: fixed pools of {smallest:g} to
{largest:g} batches, and each switch beyond the paper alone against one of them. Numbers are medians of the seeds
{seeds}; the range of the seeds stands behind the tokens per second.

Each setup has {generators} generators on {gpu}, a trainer with as many devices, {batch} groups of {group} per update,
{updates} updates, slots for the largest pool, a prompt of {prompt_tokens} tokens, and {prompts} prompts, so that a
prompt comes again after {repeat} updates. All other settings are the defaults of the
[simulator](simulator.md#settings).

| setup | devices of a generator | lengths |
|---|---|---|
{setups}

[Lengths](simulator.md#lengths) with a name are from a public trace; the lognormal ones are assumed. Tokens are trained
ones. `preempted` counts per update, staleness is that of the oldest token of a trajectory, and the trainer waits for a
share of the time. [Schedules](schedules.md#which-pool) draws the conclusions.

{limits}
"""

_LIMITS = """\
**The simulator does not know** learning: it cannot tell what a stale token costs, so a row with more tokens per second
and more staleness is no recommendation by itself. It does not know memory limits of an engine other than its cache,
prefixes shared by a group, network contention, environments, or lengths that change with training. Its constants are
assumed ([limits](simulator.md#limits)). A run holds a start and an end: large pools have not always been full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendationSetup:
    """One model with its devices and lengths."""

    title: str
    longest: int
    """Most tokens of a response."""
    model: str
    """Name in ``sim.roofline.MODELS``."""
    devices: int = 1
    """Devices of a generator; the trainer has as many as all generators."""
    lengths: str

    def arm(self, seed: int, *overrides: str) -> Arm:
        """Return the run of ``copris`` with overrides of its run file."""
        sizes = (
            f"rollout.max_new_tokens={self.longest}",
            f"generator.max_context_tokens={self.longest + 512}",
            f"schedule.groups_per_batch={_GROUPS}",
            f"schedule.group_size={_MEMBERS}",
            f"generator.replicas={GENERATORS}",
            # Room for the largest pool: the pool decides, not the slots.
            f"generator.slots={int(max(POOL_RATIOS) * _GROUPS * _MEMBERS) // GENERATORS}",
        )
        settings = (
            f"model={self.model}",
            f"tensor_parallel={self.devices}",
            f"trainer_devices={GENERATORS * self.devices}",
            f"lengths={self.lengths}",
            f"prompts={REPEAT_UPDATES * _GROUPS}",
            f"seed={seed}",
        )
        (arm,) = arms_of(None, [*sizes, *overrides], settings, [])
        return arm

    def pool_arm(self, seed: int, ratio: float, *overrides: str) -> Arm:
        """Return the run with a pool of ``ratio`` batches, and with overrides that are stronger."""
        return self.arm(seed, f"schedule.pool_size={int(ratio * _GROUPS * _MEMBERS)}", *overrides)


SETUPS = (
    RecommendationSetup(title="7B, 16k", longest=16_000, model="7b", lengths="deepcoder-14b"),
    RecommendationSetup(
        title="32B, 32k",
        longest=32_000,
        model="32b",
        devices=4,
        lengths="lognormal:median=10000,sigma=0.8,share=0.9",
    ),
    RecommendationSetup(
        title="1.5B, 8k",
        longest=8000,
        model="1.5b",
        lengths="lognormal:median=2500,sigma=0.8,share=0.9",
    ),
)
"""Setups of the tables; all else is the simulator's default."""


def simulate_all() -> Results:
    """Simulate every row at every seed, on all cores."""
    arms = {(setup.title, row): [arm(seed) for seed in SEEDS] for setup in SETUPS for row, arm in _rows(setup).items()}
    with ProcessPoolExecutor() as processes:
        found = iter(list(processes.map(_figures, [arm for seeds in arms.values() for arm in seeds])))
    return {key: [next(found) for _ in seeds] for key, seeds in arms.items()}


def recommendation_document(results: Results) -> str:
    """Return the document."""
    parts = [_introduction()]
    parts.append("\n## Pools\n\n`N' / (B n)` is the pool over the trajectories of an update.\n")
    for setup in SETUPS:
        rows = {f"{ratio:g}": results[setup.title, f"{ratio:g}"] for ratio in POOL_RATIOS}
        parts.append(f"\n### {setup.title}: pools\n\n" + _table("N' / (B n)", rows))
    parts.append(
        f"\n## Switches\n\nEach switch alone, with a fixed pool of {PLAIN_RATIO:g} batches; the automatic pool is the "
        "default.\n"
    )
    for setup in SETUPS:
        rows = {"plain": results[setup.title, f"{PLAIN_RATIO:g}"]}
        rows |= {switch: results[setup.title, switch] for switch in SWITCHES}
        parts.append(f"\n### {setup.title}: switches\n\n" + _table("switch", rows, plain="plain"))
    return "".join(parts)


def write_recommendation_document(folder: Path) -> None:
    """Simulate, and write the document into a folder."""
    write_text(folder / DOCUMENT, recommendation_document(simulate_all()))


def _introduction() -> str:
    settings = SETUPS[0].arm(SEEDS[0]).settings
    return _TEXT.format(
        smallest=min(POOL_RATIOS),
        largest=max(POOL_RATIOS),
        seeds=", ".join(map(str, SEEDS)),
        generators=GENERATORS,
        gpu=SimulationSetup().gpu,
        batch=settings.schedule.groups_per_batch,
        group=settings.schedule.group_size,
        updates=settings.limits.train_steps,
        prompt_tokens=settings.prompts.prompt_tokens,
        prompts=settings.prompts.count,
        repeat=REPEAT_UPDATES,
        setups="\n".join(f"| {setup.title} | {setup.devices} | `{setup.lengths}` |" for setup in SETUPS),
        limits=_LIMITS,
    )


def _rows(setup: RecommendationSetup) -> dict[str, Callable[[int], Arm]]:
    def pool(ratio: float) -> Callable[[int], Arm]:
        return lambda seed: setup.pool_arm(seed, ratio)

    def switch(override: str) -> Callable[[int], Arm]:
        return lambda seed: setup.pool_arm(seed, PLAIN_RATIO, override)

    rows = {f"{ratio:g}": pool(ratio) for ratio in POOL_RATIOS}
    return rows | {name: switch(override) for name, override in SWITCHES.items()}


def _figures(arm: Arm) -> Figures:
    return figures(SimulatedMesh(arm.settings).run(), arm.settings.devices)


def _table(title: str, rows: Mapping[str, Sequence[Figures]], plain: str | None = None) -> str:
    """Return a Markdown table; ``plain`` names the row that the others are compared with."""
    columns = [title, "tokens/s", *(["against plain"] if plain else []), "off-policy", "staleness", "most"]
    columns += ["preempted", "trainer waits"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    base = _speed(rows[plain]) if plain else 0.0
    for name, seeds in rows.items():
        rates = [f.trained_tokens_per_second for f in seeds]
        cells = [name, f"{median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"]
        cells += [f"{_speed(seeds) / base - 1:+.1%}"] if plain else []
        cells += [
            f"{median(f.off_policy_token_share for f in seeds):.0%}",
            f"{median(f.mean_staleness for f in seeds):.2f}",
            f"{max(max(f.staleness, default=0) for f in seeds)}",
            f"{median(f.preemptions / f.updates for f in seeds):,.0f}",
            f"{median(f.trainer_wait_share for f in seeds):.0%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _speed(seeds: Sequence[Figures]) -> float:
    return median(f.trained_tokens_per_second for f in seeds)
