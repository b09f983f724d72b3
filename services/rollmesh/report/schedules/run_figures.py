"""Figures of a pictured run, for the table of docs/schedules.md."""

from __future__ import annotations

from dataclasses import dataclass

from rollmesh.report.schedules.pictured_run import PicturedRun


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
