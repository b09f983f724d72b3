"""Arms of a comparison with all that they assume, the cost of simulating one, and the prediction for a run file."""

import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rollmesh.config import RunConfig, load_run_config
from rollmesh.errors import ConfigError
from rollmesh.scheduling.axes import Harvest
from rollmesh.scheduling.presets import PRESETS, companion_settings
from rollmesh.sim.calibration import Calibration
from rollmesh.sim.failures import FailurePlan
from rollmesh.sim.figures import Figures, figures
from rollmesh.sim.roofline import FORWARD_FLOPS, TRAIN_FLOPS, WEIGHT_BYTES, Efficiencies
from rollmesh.sim.run_timeline import RunTimeline
from rollmesh.sim.simulated_leader import LOOK_SECONDS
from rollmesh.sim.simulated_mesh import MeshSettings, SimulatedMesh
from rollmesh.sim.simulated_worker import NOTICE_SECONDS
from rollmesh.sim.simulation_setup import (
    ASSUMED_DRAFTS,
    DEFAULT_RUN,
    SCALE_RUN,
    SimulationSetup,
    mesh_settings,
    model_name,
    parse_items,
)

_OF_A_MODEL = ("gpu", "tensor_parallel", "trainer_devices", "colocated", "switch_seconds", "curve")
_OF_TIMES = ("step_fixed_seconds", "storage_bytes_per_second", "swap_seconds", "reward_seconds", "reward_sigma")
MEASURED = (*_OF_A_MODEL, "model", *_OF_TIMES, "reward_workers")
"""Settings that a calibration on a run replaces."""
_SCALE_SETTINGS = ("trainer_devices=1024", "reward_workers=4096")
_MOST_STEPS = 20


def assumptions(
    config: RunConfig, setup: SimulationSetup, settings: MeshSettings, calibrated_on: str = ""
) -> dict[str, object]:
    """Return settings and constants by name; with ``calibrated_on`` the measured times instead of those of devices."""
    if not calibrated_on:
        setup = setup.model_copy(update={"model": model_name(config, setup)})
    assumed: dict[str, object] = setup.model_dump(exclude_none=True)
    assumed |= {"prompt_tokens": settings.prompts.prompt_tokens, "prompts": settings.prompts.count}
    assumed |= {"cache_tokens": settings.fleet.cache_tokens, "solve_rate": "uniform, not changed by training"}
    fleet = settings.fleet
    if fleet.drafts is not None:
        gains = fleet.drafts.tokens_per_step(fleet.costs, fleet.slots, fleet.class_lengths)
        by_running = ", ".join(f"{gain:.2f} at {running}" for running, gain in gains.items())
        assumed |= {"drafts": setup.drafts or ASSUMED_DRAFTS, "tokens_of_a_call_per_step": by_running}
    assumed |= {"worker_notice_seconds": NOTICE_SECONDS, "leader_look_seconds": LOOK_SECONDS}
    if calibrated_on:
        kept = {name: value for name, value in assumed.items() if name not in MEASURED}
        return {"calibrated_on": calibrated_on, **_measured(settings), **kept}
    flops = {"forward_flops_per_weight": FORWARD_FLOPS, "train_flops_per_weight": TRAIN_FLOPS}
    return assumed | {"weight_bytes": WEIGHT_BYTES} | asdict(Efficiencies()) | flops


def _measured(settings: MeshSettings) -> Mapping[str, object]:
    fleet, trainer = settings.fleet, settings.trainer
    times = {
        "decode_step_seconds": fleet.costs.base[0],
        "seconds_per_sampled_token": fleet.costs.base[1] - fleet.costs.base[0],
        "seconds_per_prefilled_token": fleet.costs.prefill_seconds_per_token,
        "fetch_seconds": fleet.fetch_seconds,
        "swap_seconds": fleet.swap_seconds,
        "step_fixed_seconds": trainer.fixed_seconds,
        "train_seconds_per_token": trainer.seconds_per_token,
        "publish_seconds": trainer.publish_seconds(),
        "reward_seconds": settings.rewards.median_seconds,
    }
    shared = "generators and trainer never slow each other"
    if settings.cores is not None:
        shared = f"{settings.cores.cores}, shared by {settings.cores.generators} generators and the trainer"
    return {name: f"{value:.3g}" for name, value in times.items()} | {"cores": shared}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One simulation of a comparison."""

    name: str
    settings: MeshSettings
    assumed: Mapping[str, object]
    """Settings and constants that the run file does not give."""


def arms_of(
    run: Path | None,
    overrides: Sequence[str],
    settings: Sequence[str],
    failures: Sequence[str],
    *,
    compare: str | None = None,
    sweep: str | None = None,
    is_long: bool = False,
    is_at_scale: bool = False,
    calibrate: Path | None = None,
) -> list[Arm]:
    """Return the arms in the order of the options; one arm without ``compare`` and ``sweep``.

    ``overrides`` are fields of the run file, ``settings`` fields of ``SimulationSetup``, both as ``name=value``.
    Compared presets, and the preset of a simulation without a run file, have the settings that go with them.
    ``is_at_scale`` takes the run file and the settings that measure the simulator. ``calibrate`` takes the times of a
    run folder, its lengths unless ``settings`` gives others, and its run file without another one.
    Raises ConfigError for an unknown field or preset, and for a swept field without an effect on the simulation.
    """
    if is_at_scale and run is not None:
        raise ConfigError(f"--scale with {run}: it has a run file of its own; give one of them, and --set for fields")
    setup = parse_items("--with", SimulationSetup, [*(_SCALE_SETTINGS if is_at_scale else ()), *settings])
    measured = None
    if calibrate is not None:
        setup = _calibrated_setup(setup, calibrate)
        run, measured = run or calibrate / "config.yaml", Calibration.read(calibrate)
    plan = parse_items("--fail", FailurePlan, failures)
    file = run or (SCALE_RUN if is_at_scale else DEFAULT_RUN)
    base = load_run_config(file, overrides)

    def arm(name: str, more: Sequence[str] = ()) -> Arm:
        config = load_run_config(file, [*overrides, *more])
        if run is None or config.schedule.preset != base.schedule.preset:
            before = companion_settings(PRESETS[config.schedule.preset])
            config = load_run_config(file, [*before, *overrides, *more, *_batch_of(config, base)])
        simulated = mesh_settings(config, setup, plan, is_long=is_long)
        if measured is not None:
            simulated = measured.settings(simulated, config)
        assumed = assumptions(config, setup, simulated, "" if calibrate is None else str(calibrate))
        return Arm(name=name or config.schedule.preset, settings=simulated, assumed=assumed)

    if compare is not None and sweep is not None:
        raise ConfigError(
            "--compare and --sweep: give one of them; a preset is a value too: --sweep schedule.preset=A,B"
        )
    if compare is not None:
        return [arm(name, [f"schedule.preset={name}"]) for name in _presets(compare)]
    if sweep is None:
        return [arm("")]
    field, separator, values = sweep.partition("=")
    items = _distinct("--sweep", values)
    if not separator or not items:
        raise ConfigError(f"--sweep {sweep}: expected FIELD=VALUE,VALUE,...")
    arms = [arm(f"{field}={value}", [f"{field}={value}"]) for value in items]
    if len(arms) > 1 and all(each.settings == arms[0].settings for each in arms):
        raise ConfigError(f"--sweep {field}: the simulation does not depend on this field; sweep another one")
    return arms


def _calibrated_setup(setup: SimulationSetup, folder: Path) -> SimulationSetup:
    """Return the settings with the lengths of the run, unless they name others.

    Raises ConfigError for a setting that the calibration replaces.
    """
    if given := sorted(setup.model_fields_set & set(MEASURED)):
        raise ConfigError(f"--calibrate {folder} with {given[0]}: the run has its own; leave one of them out")
    return setup if "lengths" in setup.model_fields_set else setup.model_copy(update={"lengths": str(folder)})


def _batch_of(config: RunConfig, base: RunConfig) -> list[str]:
    """Return the override with which another preset trains on as many trajectories per update as the base."""
    groups, members = config.schedule.groups_per_batch, config.schedule.group_size
    of_one = _has_groups_of_one(config)
    if of_one == _has_groups_of_one(base) or groups != base.schedule.groups_per_batch:
        return []
    if not of_one and groups % members:
        raise ConfigError(
            f"schedule.groups_per_batch={groups} trajectories of schedule.preset={base.schedule.preset} are no whole "
            f"groups of schedule.group_size={members} for schedule.preset={config.schedule.preset}; set a multiple"
        )
    return [f"schedule.groups_per_batch={groups * members if of_one else groups // members}"]


def _has_groups_of_one(config: RunConfig) -> bool:
    section = config.schedule
    harvest = PRESETS[section.preset].harvest if section.harvest is None else Harvest(section.harvest)
    return harvest is Harvest.TRAJECTORY


def _presets(names: str) -> list[str]:
    listed = list(PRESETS) if names == "all" else _distinct("--compare", names)
    if files := [name for name in listed if name.endswith((".yaml", ".yml"))]:
        raise ConfigError(f"--compare {files[0]}: a run file comes first: rollmesh sim {files[0]} --compare")
    if unknown := [name for name in listed if name not in PRESETS]:
        raise ConfigError(f"--compare {','.join(unknown)}: unknown; the presets are {', '.join(PRESETS)}")
    if not listed:
        raise ConfigError(f"--compare: expected presets, of {', '.join(PRESETS)}")
    return listed


def _distinct(option: str, values: str) -> list[str]:
    """Return values separated by commas. Raises ConfigError for one that is there twice."""
    listed = [value.strip() for value in values.split(",") if value.strip()]
    if twice := [value for value in dict.fromkeys(listed) if listed.count(value) > 1]:
        raise ConfigError(f"{option} {values}: {', '.join(twice)} is there twice; give it once")
    return listed


def prediction(config: RunConfig, setup: SimulationSetup) -> str:
    """Simulate the first train steps, at most 20, and return the figures with the settings that they assume.

    Raises ConfigError as ``mesh_settings`` and the simulation do.
    """
    steps = min(config.trainer.train_steps, _MOST_STEPS)
    trainer = config.trainer.model_copy(update={"train_steps": steps})
    settings = mesh_settings(config.model_copy(update={"trainer": trainer}), setup)
    found = figures(SimulatedMesh(settings).run(), settings.devices)
    return (
        f"simulated, {steps} train steps: {found.updates_per_second:.3g} updates/s, staleness "
        f"{found.mean_staleness:.2f} (at most {max(found.staleness, default=0)}), the trainer waits "
        f"{found.trainer_wait_share:.0%} of the time; assumed: "
        f"{', '.join(f'{name}={value}' for name, value in assumptions(config, setup, settings).items())}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationCost:
    """Time and memory of one simulation; they differ from one run to the next."""

    processor_seconds: float
    """Processor time; the simulator has one thread."""
    peak_bytes: int
    """Largest resident memory of the process so far."""
    event_count: int
    finished: int
    """Finished trajectories."""
    microseconds_per_trajectory: float
    """Processor time per finished trajectory."""

    def sentence(self) -> str:
        """Return the cost in words."""
        return (
            f"simulated in {self.processor_seconds:.1f} s of one core and {self.peak_bytes / 1e9:.2f} GB: "
            f"{self.event_count:,} events, {self.finished:,} finished trajectories, "
            f"{self.microseconds_per_trajectory:.0f} microseconds each"
        )


def simulate_at_cost(
    arm: Arm, *, check: bool = False, timeline: RunTimeline | None = None
) -> tuple[Figures, SimulationCost]:
    """Simulate one arm, and measure the simulation itself; ``timeline`` takes samples for the page."""
    began = time.process_time()
    run = SimulatedMesh(arm.settings, check=check, timeline=timeline).run()
    seconds = time.process_time() - began
    # Linux counts kibibytes, macOS bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    cost = SimulationCost(
        processor_seconds=seconds,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        event_count=run.event_count,
        finished=run.finished,
        microseconds_per_trajectory=1e6 * seconds / max(1, run.finished),
    )
    return figures(run, arm.settings.devices), cost
