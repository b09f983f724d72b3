"""Arms of a comparison: one simulation for each preset or value, all with the same work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from rollmesh.config import RunConfig, load_run_config
from rollmesh.config.yaml_text import field_value
from rollmesh.errors import ConfigError
from rollmesh.scheduling.axes import Harvest
from rollmesh.scheduling.companions import companion_settings
from rollmesh.scheduling.presets import PRESETS
from rollmesh.sim.assumptions import MEASURED, assumptions
from rollmesh.sim.calibrated_mesh import Calibration
from rollmesh.sim.failures import FailurePlan
from rollmesh.sim.simulated_mesh import MeshSettings
from rollmesh.sim.simulation_setup import DEFAULT_RUN, SCALE_RUN, SimulationSetup, mesh_settings

_SCALE_SETTINGS = ("trainer_devices=1024", "reward_workers=4096")


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
    setup = parse_setup([*(_SCALE_SETTINGS if is_at_scale else ()), *settings])
    measured = None
    if calibrate is not None:
        setup = _calibrated_setup(setup, calibrate)
        run, measured = run or calibrate / "config.yaml", Calibration.read(calibrate)
    plan = FailurePlan.parse(list(failures), seed=setup.seed)
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


def parse_setup(items: Sequence[str]) -> SimulationSetup:
    """Read ``name=value`` items; raises ConfigError with the known names for an unknown one or a bad value."""
    values = {}
    for item in items:
        name, separator, text = item.partition("=")
        if not separator or name not in SimulationSetup.model_fields:
            raise ConfigError(
                f"--with {item}: expected NAME=VALUE, with a name of {', '.join(SimulationSetup.model_fields)}"
            )
        values[name] = field_value(SimulationSetup, [name], text)
    try:
        return SimulationSetup.model_validate(values)
    except ValidationError as error:
        lines = (f"--with {each['loc'][0]}={each['input']}: {each['msg']}" for each in error.errors())
        raise ConfigError("\n".join(lines)) from error


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
