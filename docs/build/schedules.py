"""Write docs/schedules.md and its pictures, a small run of each preset: ``python -m docs.build.schedules``.

A picture is a run on the model of the queue (``pictured_run``).
"""

from dataclasses import dataclass

from docs.build.page_text import templates, write_pages
from docs.build.picture import draw
from docs.build.pictured_run import LENGTHS, UPDATE_TICKS, UPDATES, PicturedRun
from rollmesh.cli.configuration import numbers
from rollmesh.config import load_run_config
from rollmesh.config.recipes import recipe_file
from rollmesh.report.console import percent
from rollmesh.scheduling import Schedule
from rollmesh.scheduling.presets import PRESETS, companion_settings

PICTURES = "schedules"
_BATCH, _GROUP = 4, 2
"""Groups per batch and trajectories per group of a picture."""
_TOKENS = 24
"""Most tokens of a trajectory in a picture, of which a segment is a share."""


def schedule_files() -> dict[str, str]:
    """Return the texts of the document and of its pictures by path in ``docs``."""
    runs = {preset: pictured(preset) for preset in PRESETS}
    environment = templates()
    environment.filters.update(percent=percent)
    document = environment.get_template("schedules.md.j2").render(
        presets=PRESETS,
        numbers={name: ", ".join(numbers(preset)) for name, preset in PRESETS.items()},
        figures={name: figures_of(run) for name, run in runs.items()},
        batch=_BATCH,
        size=_GROUP,
        tokens=_TOKENS,
        updates=UPDATES,
        update_ticks=UPDATE_TICKS,
        lengths=LENGTHS,
        pictures=PICTURES,
    )
    return {"schedules.md": document, **{f"{PICTURES}/{name}.svg": draw(run) for name, run in runs.items()}}


def pictured(preset: str, *overrides: str) -> PicturedRun:
    """Run the demo's run file under a preset at the size of a picture; every token is saved at once."""
    settings = ["schedule.pool_size=null", "schedule.max_staleness=null", f"schedule.preset={preset}"]
    settings += companion_settings(PRESETS[preset])
    settings += [f"schedule.groups_per_batch={_BATCH}", f"schedule.group_size={_GROUP}"]
    settings += [f"rollout.max_new_tokens={_TOKENS}", "rollout.partial_save_tokens=1", *overrides]
    config = load_run_config(recipe_file("countdown", "demo.yaml"), settings, environ={})
    run = PicturedRun(Schedule.from_config(config))
    run.run()
    return run


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """Costs of a schedule on the lengths of the pictures."""

    ticks: int
    trainer_idle: float
    """Share of the ticks in which the trainer does not work, 0..1."""
    mean_running: float
    """Mean number of trajectories that get a token in a tick."""
    mean_staleness: float
    """Mean staleness of the trained trajectories, in train steps."""
    off_policy: float
    """Share of the trained tokens that an older policy wrote, 0..1."""
    dropped: float
    """Share of the sampled tokens that no batch trains, 0..1; tokens that wait for a batch are not among them."""


def figures_of(run: PicturedRun) -> RunFigures:
    """Compute the figures of a finished run."""
    trained = [t for t in run.trajectories.values() if t.staleness is not None]
    tokens = sum(len(t.tokens) for t in trained)
    dropped = sum(len(t.dropped) for t in run.trajectories.values())
    sampled = dropped + sum(len(t.tokens) for t in run.trajectories.values())
    return RunFigures(
        ticks=run.ticks,
        trainer_idle=1 - len(run.training) / run.ticks,
        mean_running=sampled / run.ticks,
        mean_staleness=sum(t.staleness or 0 for t in trained) / len(trained),
        off_policy=sum(t.off_policy for t in trained) / tokens,
        dropped=dropped / sampled,
    )


if __name__ == "__main__":
    write_pages(schedule_files(), only=f"{PICTURES}/*.svg")
