"""What is in the trajectory queue, how old it is, and what leaves it untrained."""

from __future__ import annotations

from frame import framed
from grafana_foundation_sdk.models import dashboard as models
from panels import GREEN, ORANGE, RED, RUN, Part, Query, bars, curve, density, led, rate, row

NAME = "queue"


def build() -> models.Dashboard:
    """The queue by state, staleness against its bound, drops by reason and length."""
    return framed(
        NAME,
        "Queue and staleness",
        "Trajectories and groups by state, staleness against its bound, and what is dropped.",
        [row("Queue"), *_queue(), row("Staleness"), *_staleness(), row("Drops"), *_drops()],
    )


def _queue() -> list[Part]:
    return [
        curve(
            "Trajectories by state",
            "Pending: no worker has it. Leased: rolling out. Partial: at rest with tokens. Finished: waits for reward.",
            "none",
            Query(f"run:rollmesh_queue_trajectories:max{{{RUN}}}", "{{state}} {{run}}"),
            stacked=True,
            least=0,
        ),
        curve(
            "Pool",
            "Unfinished trajectories held by workers, beside the most that may be leased at once.",
            "none",
            Query(f"sum by (run) (rollmesh_rollout_in_flight_trajectories{{{RUN}}})", "in flight {{run}}"),
            Query(f"run:rollmesh_pool_trajectories:max{{{RUN}}}", "pool {{run}}"),
            least=0,
        ),
        curve(
            "Ready batches",
            "Complete groups that wait, in batches. Below 1 the trainer is about to wait.",
            "none",
            Query(f"run:rollmesh_ready_batches:ratio{{{RUN}}}", "{{run}}"),
            least=0,
            limits=((None, "transparent"), (1, GREEN)),
        ),
        curve(
            "Groups through the queue",
            "Admitted, cut into batches (batches times their size) and evicted, per second.",
            "ops",
            Query(rate("rollmesh_rollout_groups_admitted_total"), "admitted {{run}}"),
            Query(
                f"{rate('rollmesh_rollout_batches_cut_total')} * {led('rollmesh_rollout_batch_groups')}", "cut {{run}}"
            ),
            Query(rate("rollmesh_rollout_groups_evicted_total"), "evicted {{run}}"),
            least=0,
        ),
        curve(
            "Paused",
            "Why no rollouts are started, if they are not: a person, a failure, a recovery, a barrier of the schedule.",
            "bool",
            Query(f"run:rollmesh_paused:max{{{RUN}}}", "{{by}} {{run}}"),
            least=0,
            most=1,
        ),
        curve(
            "Memory",
            "What Redis holds and running rollouts may still write, of its maxmemory; admission stops at 80%.",
            "percentunit",
            Query(f"run:rollmesh_store_memory_ratio:max{{{RUN}}}", "{{run}}"),
            least=0,
            limits=((None, "transparent"), (0.8, ORANGE), (1, RED)),
        ),
    ]


def _staleness() -> list[Part]:
    return [
        density(
            "Staleness when cut",
            "Staleness of groups when their batch is cut, in train steps.",
            "none",
            "rollmesh_rollout_cut_staleness_steps",
        ),
        curve(
            "Staleness and its bound",
            "Mean of the last batches, the oldest unclaimed group, and the bound that no batch exceeds.",
            "none",
            Query(f"run:rollmesh_cut_staleness_steps:mean_rate5m{{{RUN}}}", "mean of batches {{run}}"),
            Query(f"run:rollmesh_unclaimed_staleness_steps:max{{{RUN}}}", "oldest unclaimed {{run}}"),
            Query(f"run:rollmesh_max_staleness_steps:max{{{RUN}}}", "bound {{run}}"),
            least=0,
        ),
        curve(
            "Headroom",
            "Train steps that the oldest unclaimed group may still wait.",
            "none",
            Query(f"run:rollmesh_staleness_headroom_steps:min{{{RUN}}}", "{{run}}"),
            limits=((None, RED), (1, GREEN)),
        ),
        curve(
            "Tokens by age",
            "Tokens kept for training, by how many versions old their policy was when they arrived.",
            "short",
            Query(rate("rollmesh_rollout_sampled_tokens_total", "run, age"), "{{age}} {{run}}"),
            stacked=True,
            least=0,
        ),
        density(
            "Version span",
            "Newest minus oldest policy version within a response.",
            "none",
            "rollmesh_rollout_version_span",
        ),
        curve(
            "Cut blocked for",
            "How long a straggler has blocked the next batch; 0 while none does.",
            "s",
            Query(
                f"(time() - {led('rollmesh_rollout_cut_blocked_since_timestamp_seconds')})"
                f" * ({led('rollmesh_rollout_cut_blocked_since_timestamp_seconds')} > bool 0)",
                "{{run}}",
            ),
            least=0,
            limits=((None, "transparent"), (300, RED)),
        ),
    ]


def _drops() -> list[Part]:
    return [
        curve(
            "Evicted groups",
            "Groups that the leader dropped, per second and by reason.",
            "ops",
            Query(rate("rollmesh_rollout_groups_evicted_total", "run, reason"), "{{reason}} {{run}}"),
            least=0,
        ),
        curve(
            "Wasted tokens",
            "Saved tokens of groups that left the queue untrained, by reason.",
            "short",
            Query(rate("rollmesh_trainer_wasted_tokens_total", "run, reason"), "{{reason}} {{run}}"),
            stacked=True,
            least=0,
        ),
        bars(
            "Trained share by length",
            "Groups that were trained rather than dropped, by length decile: a slope is length bias.",
            "percentunit",
            Query(f"run:rollmesh_trained_share:ratio{{{RUN}}}", "decile {{length_decile}}"),
            most=1,
            limits=((None, RED), (0.8, ORANGE), (0.95, GREEN)),
        ),
        bars(
            "Trained groups by length",
            "Groups trained on since the trainer started, by length decile of their longest trajectory.",
            "none",
            Query(f"sum by (length_decile) (rollmesh_trainer_groups_total{{{RUN}}})", "decile {{length_decile}}"),
        ),
        curve(
            "Zero variance in a row",
            "Groups in a row whose rewards were all equal; too many end the run.",
            "none",
            Query(led("rollmesh_rollout_filtered_in_a_row_groups"), "{{run}}"),
            least=0,
        ),
        curve(
            "Dead letters",
            "Trajectories that gave up and are kept for inspection.",
            "none",
            Query(f"run:rollmesh_dead_letters:max{{{RUN}}}", "{{run}}"),
            least=0,
        ),
    ]
