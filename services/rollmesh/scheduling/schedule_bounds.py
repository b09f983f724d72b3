"""Bounds of a schedule: the values of the run file, or those of its preset, checked against each other."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from rollmesh.config.curriculum import CurriculumConfig
from rollmesh.config.schedule import ScheduleConfig
from rollmesh.errors import ConfigError
from rollmesh.scheduling.axes import AdmissionRule, OnStale
from rollmesh.scheduling.presets import PRESETS, Preset


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Numbers of groups and trajectories that a schedule may have in flight, and their age."""

    group_size: int
    max_staleness: int
    window_groups: int
    wave_batches: int
    spare_groups: int
    spare_members: int
    launched_members: int
    """Members that the first round of a group launches, spare ones included."""
    most_members: int
    """Most members that all rounds of a group launch; replacements of members without a score come on top."""
    pool_size: int
    part_groups: int

    @classmethod
    def from_section(
        cls, section: ScheduleConfig, curriculum: CurriculumConfig, on_stale: OnStale, group_size: int
    ) -> Self:
        """Resolve the section for groups of ``group_size`` scored trajectories, with the planner of the curriculum.

        Raises ConfigError for values that contradict each other or the preset.
        """
        preset = PRESETS[section.preset]
        staleness = _staleness(section, preset)
        window = _window(section, preset, staleness, on_stale)
        larger = _larger_window(section, preset, window, on_stale)
        waves, spare = _wave(section, preset, window, larger)
        spare_members = section.spare_members
        if spare_members is None:
            spare_members = math.ceil(preset.spare_member_share * group_size)
        parts, batch = section.part_groups, section.groups_per_batch
        launched = curriculum.first_members(group_size) + spare_members
        most = curriculum.members_in_all_rounds(group_size) + spare_members
        return cls(
            group_size=group_size,
            max_staleness=staleness,
            window_groups=window,
            wave_batches=waves,
            spare_groups=spare,
            spare_members=spare_members,
            launched_members=launched,
            most_members=most,
            pool_size=_pool(section, staleness, window, (launched, most, spare_members), larger),
            part_groups=batch // math.gcd(batch, preset.parts) if parts is None and preset.parts else parts or 0,
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
    if pool is None:
        batches = PRESETS[section.preset].pool_batches
        groups = window if batches is None else min(window, math.ceil(batches * section.groups_per_batch))
        return groups * launched
    if pool == "auto":
        return limit
    if pool > limit:
        of_group = "group_size" if most - spare == section.group_size else "members of a group"
        raise ConfigError(
            f"schedule.pool_size={pool} is above window_groups * ({of_group} + spare_members) = {window} * "
            f"({most - spare} + {spare}) = {limit}: with schedule.max_staleness={staleness} the "
            f"rest of the pool could never be filled; lower pool_size{larger}"
        )
    return pool
