"""Bounds of a schedule: the values of the run file, or those of its preset. Raise ConfigError for a contradiction."""

import math
from dataclasses import dataclass

from rollmesh.config import RunConfig
from rollmesh.config.schedule import ScheduleConfig
from rollmesh.errors import ConfigError
from rollmesh.scheduling.axes import AdmissionRule, CutOrder, Harvest, OnStale
from rollmesh.scheduling.presets import PRESETS, Preset


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Part of a schedule that other settings may contradict: groups and trajectories in flight, and their age.

    B = groups_per_batch, n = group_size, N' = pool_size.
    """

    groups_per_batch: int
    group_size: int
    """Scored trajectories that complete a group; 1 if every trajectory is a group."""
    harvest: Harvest
    prompt_repeats: int
    """Groups in a row that have the same prompt."""
    wave_batches: int
    """Batches of a wave; the next wave opens after they are cut."""
    spare_groups: int
    """Groups open beyond those that the wave needs."""
    spare_members: int
    """Trajectories launched per group beyond group_size; the surplus is cut off once group_size are scored."""
    launched_members: int
    """Trajectories that a new group has: those of the first round of its planner, or group_size and the spare ones."""
    most_members: int
    """Most trajectories that the rounds of a group launch; launched_members without a planner of several rounds."""
    window_groups: int
    """Most groups admitted and not yet trained on."""
    pool_size: int
    """Trajectories leased at once over the whole mesh; the most of an automatic pool."""
    part_groups: int
    """Groups whose gradient the trainer computes at a time, before the cut; 0 for none."""
    cut_order: CutOrder
    max_staleness: int
    """Train steps between the oldest token in the loss and the trainer, at the optimizer step."""
    on_stale: OnStale

    @classmethod
    def resolve(cls, config: RunConfig) -> "Bounds":
        """Apply the run file to its preset. Raises ConfigError for values that contradict each other or the preset."""
        section, curriculum = config.schedule, config.curriculum
        preset, batch = PRESETS[section.preset], section.groups_per_batch
        on_stale = preset.on_stale if section.on_stale is None else OnStale(section.on_stale)
        harvest = preset.harvest if section.harvest is None else Harvest(section.harvest)
        repeats = section.group_size if harvest is Harvest.TRAJECTORY else 1
        size = section.group_size // repeats
        staleness = _staleness(section, preset)
        window = _window(section, preset, staleness, on_stale)
        larger = _larger_window(section, preset, window, on_stale)
        waves, spare_groups = _wave(section, preset, window, larger)
        spare, parts = section.spare_members, section.part_groups
        spare = math.ceil(preset.spare_member_share * size) if spare is None else spare
        launched = curriculum.first_members(size) + spare
        most = curriculum.members_in_all_rounds(size) + spare
        return Bounds(
            groups_per_batch=batch,
            group_size=size,
            harvest=harvest,
            prompt_repeats=repeats,
            wave_batches=waves,
            spare_groups=spare_groups,
            spare_members=spare,
            launched_members=launched,
            most_members=most,
            window_groups=window,
            pool_size=_pool(section, staleness, window, (launched, most, spare), larger),
            part_groups=batch // math.gcd(batch, preset.parts) if parts is None and preset.parts else parts or 0,
            cut_order=preset.cut_order if section.cut_order is None else CutOrder(section.cut_order),
            max_staleness=staleness,
            on_stale=on_stale,
        )


def _staleness(section: ScheduleConfig, preset: Preset) -> int:
    given = section.max_staleness
    if preset.fixed_staleness and given not in (None, preset.max_staleness):
        raise ConfigError(
            f"schedule.max_staleness={given}: schedule.preset={section.preset} is max_staleness="
            f"{preset.max_staleness} by definition; leave it null or take another preset (copris, areal)"
        )
    if given is not None:
        return given
    if preset.staleness_follows_window and section.window_groups is not None:
        return max(0, math.ceil(section.window_groups / section.groups_per_batch) - 1)
    return preset.max_staleness


def _window(section: ScheduleConfig, preset: Preset, staleness: int, on_stale: OnStale) -> int:
    # docs/architecture.md: The staleness bound
    batch, window = section.groups_per_batch, section.window_groups
    most = (staleness + 1) * batch
    if window is None:
        preferred = most if preset.window_batches is None else math.ceil(preset.window_batches * batch)
        return min(preferred, most) if on_stale is OnStale.PACE else preferred
    if window < batch:
        raise ConfigError(
            f"schedule.window_groups={window} is below schedule.groups_per_batch={batch}: no batch could ever be "
            f"complete; raise it to at least {batch}, or leave it null"
        )
    if on_stale is OnStale.PACE and window > most:
        raised = "" if preset.fixed_staleness else ", raise max_staleness"
        raise ConfigError(
            f"schedule.window_groups={window} is above (max_staleness + 1) * groups_per_batch = "
            f"({staleness} + 1) * {batch} = {most}: with schedule.on_stale=pace the last groups of the window could "
            f"not be trained within the bound; set at most {most}{raised}, or take another on_stale"
        )
    return window


def _larger_window(section: ScheduleConfig, preset: Preset, window: int, on_stale: OnStale) -> str:
    """Return the fields that may enlarge the window, as the end of an error; a preset can fix both."""
    if not preset.fixed_staleness:
        return ", or raise window_groups or max_staleness"
    if on_stale is not OnStale.PACE or window < (preset.max_staleness + 1) * section.groups_per_batch:
        return ", or raise window_groups"
    return f"; schedule.preset={section.preset} opens no more groups at once"


def _wave(section: ScheduleConfig, preset: Preset, window: int, larger: str) -> tuple[int, int]:
    """Return (wave_batches, spare_groups); ``larger`` ends the error of a wave that the window cannot hold."""
    batch = section.groups_per_batch
    waves = preset.wave_batches if section.wave_batches is None else section.wave_batches
    spare = section.spare_groups
    if preset.admission is not AdmissionRule.WAVE:
        for name, value, without in (("wave_batches", waves, 1), ("spare_groups", spare or 0, 0)):
            if value != without:
                named = ", ".join(sorted(n for n, p in PRESETS.items() if p.admission is AdmissionRule.WAVE))
                raise ConfigError(
                    f"schedule.{name}={value}: schedule.preset={section.preset} opens no waves of groups, so it would "
                    f"have no effect; leave it null, or take a preset with waves ({named})"
                )
        return 1, 0
    if spare is None:
        spare = min(math.ceil(preset.spare_batches * batch), max(0, window - waves * batch))
    if waves * batch + spare > window:
        lower = " or ".join(
            n for n, value, least in (("wave_batches", waves, 1), ("spare_groups", spare, 0)) if value > least
        )
        raise ConfigError(
            f"schedule.wave_batches * groups_per_batch + spare_groups = {waves} * {batch} + {spare} = "
            f"{waves * batch + spare} is above the window of {window} groups: the rest of the wave could never open; "
            f"lower {lower}{larger}"
        )
    return waves, spare


def _pool(section: ScheduleConfig, staleness: int, window: int, members: tuple[int, int, int], larger: str) -> int:
    """Return the pool size; ``larger`` ends the error of a pool that the window cannot fill.

    ``members`` has the members of the first round of a group, those of all its rounds, and the spare ones in both.
    """
    # docs/architecture.md: The staleness bound
    (launched, most, spare), pool = members, section.pool_size
    limit = window * most
    if pool is None or pool == "auto":
        batches = PRESETS[section.preset].pool_batches
        groups = window if batches is None else min(window, math.ceil(batches * section.groups_per_batch))
        return groups * launched
    if pool > limit:
        of_group = "group_size" if most - spare == section.group_size else "members of a group"
        raise ConfigError(
            f"schedule.pool_size={pool} is above window_groups * ({of_group} + spare_members) = {window} * "
            f"({most - spare} + {spare}) = {limit}: with schedule.max_staleness={staleness} the "
            f"rest of the pool could never be filled; lower pool_size{larger}"
        )
    return pool
