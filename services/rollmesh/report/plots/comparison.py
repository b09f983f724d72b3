"""Comparison plot of several runs: reward by updates, by trained tokens, by seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rollmesh.report.plots import style as s
from rollmesh.report.plots.learning_plots import SMOOTHING_STEPS, version_steps
from rollmesh.report.series import EvaluationPoint, FloatArray, TrainSeries, seconds_of_training, smoothed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Run = tuple[TrainSeries, Sequence[EvaluationPoint]]
_COLOURS = (s.BLUE, s.ORANGE, s.GREEN, s.PURPLE, s.RED, s.GREY)


def comparison_plot(arms: Mapping[str, Sequence[Run]]) -> Figure:
    """Draw one colour per label, one line per run, and rings for evaluations; warm-up is included."""
    figure = s.new_figure(width=s.WIDE, height=3.3)
    panels = list(figure.subplots(1, 3, sharey=True))
    for (label, runs), colour in zip(arms.items(), _COLOURS * (1 + len(arms) // len(_COLOURS)), strict=False):
        for i, (train, evaluations) in enumerate(runs):
            name = label if i == 0 else "_nolegend_"
            for axes, clock in zip(panels, clocks(train), strict=True):
                _draw(axes, clock, train, evaluations, colour, name)
    for axes, label in zip(panels, ("train step", "trained tokens", "seconds of training"), strict=True):
        s.finish(axes, x=label, y="mean reward" if axes is panels[0] else "", integer_x=label == "train step")
    s.thousands(panels[1].xaxis)
    panels[0].set_title("Runs compared")
    s.legend(panels[0])
    return figure


def clocks(train: TrainSeries) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return (train steps, trained tokens so far, seconds of training) per step."""
    seconds = seconds_of_training(train.sessions, train["time"])
    return train["train_step"], np.cumsum(np.nan_to_num(train["batch.trained_tokens"])), seconds


def _draw(
    axes: Axes,
    clock: FloatArray,
    train: TrainSeries,
    evaluations: Sequence[EvaluationPoint],
    colour: str,
    name: str,
) -> None:
    reward = smoothed(train["batch.outcome_mean"], SMOOTHING_STEPS)
    axes.plot(clock, reward, color=colour, linewidth=1.3, alpha=0.85, label=name)
    steps = version_steps(train)
    for point in evaluations:
        step = steps.get(point.policy_version)
        indices = np.flatnonzero(train["train_step"] == step)
        if step == 0 or len(indices):
            at = 0.0 if step == 0 else float(clock[indices[0]])
            axes.plot(
                [at], [point.mean], "o", color=colour, mfc="none", markersize=5, clip_on=False, label="_nolegend_"
            )
