"""Generator of ``docs/schedules.md`` and its pictures, from the presets and a small run of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import fill

from jinja2 import Environment, PackageLoader

from rollmesh.file_writes import write_text
from rollmesh.report.formats import percent
from rollmesh.report.schedules.picture import draw
from rollmesh.report.schedules.pictured_run import LENGTHS, UPDATE_TICKS, UPDATES, PicturedRun
from rollmesh.report.schedules.preset_advice import ADVICE
from rollmesh.report.schedules.preset_schedule import (
    PICTURED_BATCH,
    PICTURED_GROUP,
    PICTURED_TOKENS,
    pictured_schedule,
)
from rollmesh.report.schedules.run_figures import figures_of
from rollmesh.scheduling.presets import PRESETS, Preset

DOCUMENT = "schedules.md"
PICTURES = "schedules"


def schedule_files(numbers: Callable[[Preset], Sequence[str]]) -> dict[str, str]:
    """Return the texts of the document and of its pictures by path in ``docs``; ``numbers`` describes a preset."""
    runs = {preset: _pictured(preset) for preset in PRESETS}
    environment = Environment(loader=PackageLoader("rollmesh.report"), trim_blocks=True, keep_trailing_newline=True)
    environment.filters.update(wrapped=lambda text: fill(text, 120, break_on_hyphens=False), percent=percent)
    document = environment.get_template("schedules.md.j2").render(
        presets=PRESETS,
        numbers={name: ", ".join(numbers(preset)) for name, preset in PRESETS.items()},
        advice=ADVICE,
        figures={name: figures_of(run) for name, run in runs.items()},
        batch=PICTURED_BATCH,
        size=PICTURED_GROUP,
        tokens=PICTURED_TOKENS,
        updates=UPDATES,
        update_ticks=UPDATE_TICKS,
        lengths=LENGTHS,
        pictures=PICTURES,
    )
    return {DOCUMENT: document, **{f"{PICTURES}/{name}.svg": draw(run) for name, run in runs.items()}}


def write_schedule_files(folder: Path, numbers: Callable[[Preset], Sequence[str]]) -> None:
    """Write the document and its pictures, and delete pictures of former presets."""
    files = schedule_files(numbers)
    (folder / PICTURES).mkdir(exist_ok=True)
    for picture in (folder / PICTURES).glob("*.svg"):
        picture.unlink()
    for name, text in files.items():
        write_text(folder / name, text)


def _pictured(preset: str) -> PicturedRun:
    run = PicturedRun(pictured_schedule(preset))
    run.run()
    return run
