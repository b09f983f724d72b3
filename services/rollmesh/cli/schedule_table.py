"""Command ``rollmesh schedules``: every preset with its numbers, its source, its use and its cost."""

from __future__ import annotations

import typer

from rollmesh.scheduling.axes import AdmissionRule, CutOrder, Harvest, StartOrder
from rollmesh.scheduling.presets import PRESETS, Preset


def schedules() -> None:
    """Print the schedules that `schedule.preset` names: numbers, source, deviations, use, cost, companion settings.

    B is `schedule.groups_per_batch`, n is `schedule.group_size`, the trajectories of a prompt. Every number can be
    overridden in the run file.

    Example: `rollmesh schedules`
    """
    for name, preset in PRESETS.items():
        typer.secho(name, bold=True)
        typer.echo(f"  {', '.join(numbers(preset))}")
        typer.echo(f"  source: {preset.source}")
        if preset.deviation:
            typer.echo(f"  differs: {preset.deviation}")
        typer.echo(f"  use: {preset.use}")
        typer.echo(f"  cost: {preset.cost}")
        if preset.goes_with:
            typer.echo(f"  goes with: {preset.goes_with}")


def numbers(preset: Preset) -> list[str]:
    """Return the fields of the run file that a preset sets, with their values in B and n."""
    window = preset.max_staleness + 1 if preset.window_batches is None else preset.window_batches
    size = "n" if preset.harvest is Harvest.GROUP else "1"
    members = size if not preset.spare_member_share else f"{1 + preset.spare_member_share:g} {size}"
    pool = window if preset.pool_batches is None else preset.pool_batches
    optional = {
        f"harvest {preset.harvest}": preset.harvest is not Harvest.GROUP,
        f"wave_batches {preset.wave_batches}": preset.admission is AdmissionRule.WAVE,
        f"spare_groups {preset.spare_batches:g} B": preset.spare_batches,
        f"spare_members {preset.spare_member_share:g} n": preset.spare_member_share,
        f"segment_tokens max_new_tokens / {preset.segments}": preset.segments,
        f"part_groups B / {preset.parts}": preset.parts,
        f"start_order {preset.start_order}": preset.start_order is not StartOrder.ADMISSION,
        f"cut_order {preset.cut_order}": preset.cut_order is not CutOrder.ADMISSION,
        "barrier": preset.barrier,
    }
    return [
        f"admission {preset.admission}",
        f"max_staleness {preset.max_staleness}",
        f"window_groups {window:g} B",
        f"pool_size {pool:g} B * {members}",
        f"on_stale {preset.on_stale}",
        *(text for text, shown in optional.items() if shown),
    ]
