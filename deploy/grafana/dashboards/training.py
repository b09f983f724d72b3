"""How the policy learns, how far off-policy its data are, and where a train step's time goes."""

from __future__ import annotations

from frame import framed
from grafana_foundation_sdk.models import dashboard as models
from panels import ORANGE, RED, RUN, Part, Query, curve, density, rate, row

NAME = "training"


def build() -> models.Dashboard:
    """Learning curves, off-policy health, time and throughput of the trainer."""
    return framed(
        NAME,
        "Training and off-policy health",
        "Rewards, loss and gradients; staleness, ratios and gaps between engine and trainer; time of a step.",
        [row("Learning"), *_learning(), row("Off-policy health"), *_health(), row("Work"), *_work()],
    )


def _trainer(name: str, legend: str = "{{run}}") -> Query:
    return Query(f"rollmesh_trainer_{name}{{{RUN}}}", legend)


def _learning() -> list[Part]:
    return [
        curve(
            "Reward",
            "Mean outcome of the batch before shaping, and the shaped reward that was trained on.",
            "none",
            _trainer("outcome_mean", "outcome {{run}}"),
            _trainer("reward_mean", "reward {{run}}"),
        ),
        curve("Loss", "Loss of the newest step; what it means depends on the algorithm.", "none", _trainer("loss")),
        curve("Gradient norm", "Before clipping.", "none", _trainer("grad_norm"), least=0),
        curve("Entropy", "Mean entropy per token, in nats.", "none", _trainer("entropy_nats"), least=0),
        curve(
            "Response length",
            "Mean of the batch, in tokens.",
            "none",
            _trainer("response_length_mean_tokens"),
            least=0,
        ),
        curve(
            "Truncated responses",
            "Share of the batch's trajectories that were cut off by the token budget.",
            "percentunit",
            _trainer("truncated_ratio"),
            least=0,
            most=1,
        ),
        curve(
            "Groups without signal",
            "Share of the trained groups whose rewards were all equal, and which way.",
            "percentunit",
            Query(
                f"{rate('rollmesh_trainer_zero_variance_groups_total', 'run, outcome')}"
                f" / on (run) group_left () {rate('rollmesh_trainer_groups_total')}",
                "{{outcome}} {{run}}",
            ),
            stacked=True,
            least=0,
            most=1,
        ),
        curve("Learning rate", "Of the newest step.", "sci", _trainer("learning_rate"), least=0),
        curve(
            "Skipped updates",
            "Updates per second that were dropped for a gradient that is not finite.",
            "ops",
            Query(rate("rollmesh_trainer_skipped_updates_total"), "{{run}}"),
            least=0,
        ),
    ]


def _health() -> list[Part]:
    return [
        curve(
            "Effective sample size",
            "Of the importance weights over trajectories, per trajectory: 1 is on-policy.",
            "percentunit",
            _trainer("effective_sample_ratio"),
            least=0,
            most=1,
            limits=((None, RED), (0.3, "transparent")),
        ),
        curve(
            "Importance ratio",
            "Mean over tokens; it should stay near 1.",
            "none",
            _trainer("ratio_mean"),
        ),
        curve(
            "Clipped, capped, masked",
            "Shares of tokens whose gradient a clip cut, whose weight was capped, and which were outside of the loss.",
            "percentunit",
            _trainer("ratio_clipped_ratio", "clipped {{run}}"),
            _trainer("ratio_truncated_ratio", "capped {{run}}"),
            _trainer("masked_ratio", "masked {{run}}"),
            least=0,
            most=1,
        ),
        curve(
            "KL to the behavior policy",
            "Estimators k1 and k3 per token, in nats.",
            "none",
            _trainer("kl_behavior_k1_nats", "k1 {{run}}"),
            _trainer("kl_behavior_k3_nats", "k3 {{run}}"),
        ),
        curve(
            "Gap between engine and trainer",
            "Mean difference of log-probabilities in nats: on tokens of the current version, where only rounding "
            "should differ, and on tokens that attended to another version's cache.",
            "none",
            _trainer("logprob_gap_pure_nats", "pure {{run}}"),
            _trainer("logprob_gap_mixed_cache_nats", "mixed cache {{run}}"),
            least=0,
            limits=((None, "transparent"), (0.05, RED)),
        ),
        curve(
            "Tokens behind the gaps",
            "A gap over few tokens says little.",
            "short",
            _trainer("logprob_gap_pure_tokens", "pure {{run}}"),
            _trainer("logprob_gap_mixed_cache_tokens", "mixed cache {{run}}"),
            least=0,
        ),
        curve(
            "Off-policy tokens",
            "Shares of trained tokens with staleness above 0, and of those with another version's cache.",
            "percentunit",
            _trainer("off_policy_token_ratio", "stale {{run}}"),
            _trainer("mixed_cache_token_ratio", "mixed cache {{run}}"),
            least=0,
            most=1,
        ),
        density("Staleness of trained trajectories", "In train steps.", "none", "rollmesh_trainer_staleness_steps"),
        curve(
            "Staleness and span",
            "Mean staleness of trained tokens in train steps, and mean version span within a trajectory.",
            "none",
            _trainer("token_staleness_mean_steps", "staleness {{run}}"),
            _trainer("version_span_mean", "span {{run}}"),
            least=0,
        ),
        curve(
            "Old log-probabilities that fell back",
            "Tokens per second whose old log-probability had to be the sampler's, by reason.",
            "short",
            Query(rate("rollmesh_trainer_old_logprob_fallbacks_total", "run, reason"), "{{reason}} {{run}}"),
            least=0,
        ),
    ]


def _work() -> list[Part]:
    return [
        curve(
            "Time of a train step",
            "Seconds by phase, per step over the last moments.",
            "s",
            Query(
                f"{rate('rollmesh_trainer_phase_seconds_sum', 'run, phase')}"
                f" / on (run) group_left () {rate('rollmesh_trainer_steps_total')}",
                "{{phase}} {{run}}",
            ),
            stacked=True,
            least=0,
        ),
        curve(
            "Trainer waits",
            "Share of the last half hour without a batch.",
            "percentunit",
            Query(f"run:rollmesh_trainer_wait:ratio_rate30m{{{RUN}}}", "{{run}}"),
            least=0,
            most=1,
            limits=((None, "transparent"), (0.5, ORANGE)),
        ),
        curve(
            "Trained tokens",
            "Tokens in the numerator of the loss, per second.",
            "short",
            Query(rate("rollmesh_trainer_trained_tokens_total"), "{{run}}"),
            least=0,
        ),
        curve(
            "Goodput",
            "Trained tokens per saved token since the run began, and per sampled token in the last half hour.",
            "percentunit",
            _trainer("goodput_ratio", "whole run {{run}}"),
            Query(f"run:rollmesh_goodput:ratio_rate30m{{{RUN}}}", "half an hour {{run}}"),
            least=0,
            most=1,
        ),
        curve(
            "Steps",
            "Train steps per minute, and those replayed after a restart.",
            "none",
            Query(f"60 * {rate('rollmesh_trainer_steps_total')}", "steps {{run}}"),
            Query(f"60 * {rate('rollmesh_trainer_replayed_steps_total')}", "replayed {{run}}"),
            least=0,
        ),
        curve(
            "Trajectories",
            "Trained on, per second.",
            "ops",
            Query(rate("rollmesh_trainer_trajectories_total"), "{{run}}"),
            least=0,
        ),
    ]
