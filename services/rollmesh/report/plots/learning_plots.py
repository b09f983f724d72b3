"""Plots of the training: reward, response length, off-policy correction, policy drift."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rollmesh.report.plots import style as s
from rollmesh.report.series import EvaluationPoint, TrainSeries, smoothed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMOOTHING_STEPS = 5
STEP_LABEL = "train step"


def version_steps(train: TrainSeries) -> dict[int, float]:
    """Return the train step of every policy version in the metrics; version 0 is step 0."""
    known = ~np.isnan(train.policy_version)
    pairs = zip(train.policy_version[known], train.train_step[known], strict=True)
    return {0: 0.0} | {int(version): float(step) for version, step in pairs}


def reward_plot(train: TrainSeries, evaluations: Sequence[EvaluationPoint]) -> Figure:
    """Draw mean reward per train step (dots), its moving mean (line), evaluations with one standard error."""
    figure = s.new_figure()
    (axes,) = s.panels(figure, (1,))
    axes.plot(train.train_step, train.reward, ".", color=s.BLUE, alpha=0.5, markersize=5, markeredgewidth=0)
    axes.plot(
        train.train_step,
        smoothed(train.reward, SMOOTHING_STEPS),
        color=s.BLUE,
        label=f"training, mean of {SMOOTHING_STEPS} steps",
    )
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
    length.plot(train.train_step, train.length_p90, color=s.GREY, label="90th percentile")
    length.plot(train.train_step, train.length_mean, color=s.BLUE, label="mean")
    length.set_title("Response length")
    s.finish(length, x="", y="tokens", zero=True, integer_x=True)
    s.legend(length)
    truncated.fill_between(train.train_step, 0, train.truncated_share, color=s.RED, alpha=0.22, linewidth=0)
    truncated.plot(train.train_step, train.truncated_share, color=s.RED, linewidth=1.4)
    s.finish(truncated, x=STEP_LABEL, y="truncated", integer_x=True)
    highest = float(np.nanmax(train.truncated_share, initial=0.0))
    s.percent_axis(truncated, top=max(0.05, 1.25 * highest))
    return figure


def correction_plot(train: TrainSeries) -> Figure:
    """Draw off-policy share, effective sample size and clip fraction."""
    figure = s.new_figure()
    rows = (
        ("off-policy\ntokens", train.off_policy_share, s.PURPLE, 1.0),
        ("effective\nsample size", train.effective_sample_size, s.GREEN, 1.0),
        ("clipped\ntokens", train.clip_fraction, s.RED, None),
    )
    panels = s.panels(figure, (1, 1, 1))
    for axes, (label, values, colour, top) in zip(panels, rows, strict=True):
        axes.fill_between(train.train_step, 0, values, color=colour, alpha=0.16, linewidth=0)
        axes.plot(train.train_step, values, color=colour)
        s.finish(axes, x=STEP_LABEL if axes is panels[-1] else "", y=label, integer_x=True)
        s.percent_axis(axes, top=top)
    panels[0].set_title("Off-policy correction")
    return figure


def drift_plot(train: TrainSeries) -> Figure:
    """Draw entropy and KL(behavior || policy) per token, and the largest engine/trainer gap on the same weights."""
    figure = s.new_figure()
    rows = (
        ("entropy\nnats", train.entropy, s.BLUE),
        ("KL\nnats", train.kl_behavior, s.PURPLE),
        ("engine gap\nnats", train.logprob_gap, s.ORANGE),
    )
    panels = s.panels(figure, (1, 1, 1))
    for axes, (label, values, colour) in zip(panels, rows, strict=True):
        axes.plot(train.train_step, values, color=colour)
        s.finish(axes, x=STEP_LABEL if axes is panels[-1] else "", y=label, integer_x=True, ticks=3)
    s.decades(panels[-1], train.logprob_gap)
    panels[0].set_title("Policy drift")
    return figure
