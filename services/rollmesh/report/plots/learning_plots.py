"""Plots of the training: reward, response length, off-policy correction, policy drift."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np

from rollmesh.report.plots import style as s
from rollmesh.report.series import EvaluationPoint, TrainSeries, smoothed
from rollmesh.step_metrics import panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMOOTHING_STEPS = 5
STEP_LABEL = "train step"


def version_steps(train: TrainSeries) -> dict[int, float]:
    """Return the train step of every policy version in the metrics; version 0 is step 0."""
    known = ~np.isnan(train["policy_version"])
    pairs = zip(train["policy_version"][known], train["train_step"][known], strict=True)
    return {0: 0.0} | {int(version): float(step) for version, step in pairs}


def reward_plot(train: TrainSeries, evaluations: Sequence[EvaluationPoint]) -> Figure:
    """Draw mean reward per train step (dots), its moving mean (line), evaluations with one standard error."""
    figure = s.new_figure()
    (axes,) = s.panels(figure, (1,))
    step, reward = train["train_step"], train["batch.outcome_mean"]
    axes.plot(step, reward, ".", color=s.BLUE, alpha=0.5, markersize=5, markeredgewidth=0)
    label = f"training, mean of {SMOOTHING_STEPS} steps"
    axes.plot(step, smoothed(reward, SMOOTHING_STEPS), color=s.BLUE, label=label)
    if evaluations:
        steps = version_steps(train)
        axes.errorbar(
            [steps.get(e.policy_version, e.policy_version) for e in evaluations],
            [e.mean for e in evaluations],
            yerr=[np.nan_to_num(e.standard_error) for e in evaluations],
            fmt="o",
            color=s.ORANGE,
            markersize=5.5,
            markeredgecolor=s.SURFACE,
            elinewidth=1.4,
            capsize=3,
            zorder=5,
            clip_on=False,
            label="evaluation ± 1 SE",
        )
    axes.set_title("Reward")
    s.finish(axes, x=STEP_LABEL, y="mean reward", integer_x=True)
    s.legend(axes)
    return figure


def length_plot(train: TrainSeries) -> Figure:
    """Draw response length, and the share of responses truncated by the token budget."""
    figure = s.new_figure()
    length, truncated = s.panels(figure, (2.1, 1))
    step, share = train["train_step"], train["batch.truncated_share"]
    length.plot(step, train["batch.response_length_deciles.9"], color=s.GREY, label="90th percentile")
    length.plot(step, train["response_length_mean"], color=s.BLUE, label="mean")
    length.set_title("Response length")
    s.finish(length, x="", y="tokens", zero=True, integer_x=True)
    s.legend(length)
    truncated.fill_between(step, 0, share, color=s.RED, alpha=0.22, linewidth=0)
    truncated.plot(step, share, color=s.RED, linewidth=1.4)
    s.finish(truncated, x=STEP_LABEL, y="truncated", integer_x=True)
    s.percent_axis(truncated, top=max(0.05, 1.25 * float(np.nanmax(share, initial=0.0))))
    return figure


def correction_plot(train: TrainSeries) -> Figure:
    """Draw shares of tokens and trajectories: off-policy share, effective sample size, clip fraction."""
    figure = s.new_figure()
    rows = panels("correction")
    stacked = s.panels(figure, (1,) * len(rows))
    for axes, (panel, field), colour in zip(stacked, rows, cycle((s.PURPLE, s.GREEN, s.RED, s.BLUE)), strict=False):
        axes.fill_between(train["train_step"], 0, train[field], color=colour, alpha=0.16, linewidth=0)
        axes.plot(train["train_step"], train[field], color=colour)
        s.finish(axes, x=STEP_LABEL if axes is stacked[-1] else "", y=panel.label, integer_x=True)
        s.percent_axis(axes, top=1.0 if panel.axis == "whole" else None)
    stacked[0].set_title("Off-policy correction")
    return figure


def drift_plot(train: TrainSeries) -> Figure:
    """Draw entropy and KL(behavior || policy) per token, and the largest engine/trainer gap on the same weights."""
    figure = s.new_figure()
    rows = panels("drift")
    stacked = s.panels(figure, (1,) * len(rows))
    for axes, (panel, field), colour in zip(stacked, rows, cycle((s.BLUE, s.PURPLE, s.ORANGE, s.GREEN)), strict=False):
        axes.plot(train["train_step"], train[field], color=colour)
        s.finish(axes, x=STEP_LABEL if axes is stacked[-1] else "", y=panel.label, integer_x=True, ticks=3)
        if panel.axis == "decades":
            s.decades(axes, train[field])
    stacked[0].set_title("Policy drift")
    return figure
