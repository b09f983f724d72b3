"""Contents and age of the trajectory queue, and trajectories that leave it untrained."""

from frame import Page
from panels import (
    GREEN,
    ORANGE,
    RED,
    Query,
    above,
    bars,
    curve,
    density,
    led,
    per_second,
    rate,
    rule,
    total,
)

PAGE = Page(
    name="queue",
    title="Queue and staleness",
    description="Trajectories and groups by state, staleness against its bound, and what is dropped.",
    rows={
        "Queue": [
            curve(
                "Trajectories by state",
                "Pending: no worker has it. Leased: rolling out. Partial: saved, without a worker. Finished: waits for "
                "reward.",
                rule("queue_trajectories:max", legend="{{state}} {{run}} {{namespace}}"),
                stacked=True,
            ),
            curve(
                "Pool",
                "Unfinished trajectories leased by workers, and the maximum that may be leased at once.",
                total("rollmesh_rollout_in_flight_trajectories", word="in flight"),
                rule("pool_trajectories:max", word="pool"),
            ),
            curve(
                "Automatic pool",
                "Trajectories that the trainer can consume in time, and that the generators' caches hold: the smaller "
                "bound is the pool. Empty with a fixed pool.",
                Query(led("rollmesh_rollout_auto_pool_bound_trajectories", "by"), "{{by}} {{run}} {{namespace}}"),
            ),
            curve(
                "Time to ready and time per update",
                "Time from the admission of a group to ready, and of the trainer for an update. The automatic pool "
                "follows their ratio.",
                Query(led("rollmesh_rollout_ready_seconds"), "to ready {{run}} {{namespace}}"),
                Query(led("rollmesh_rollout_update_seconds"), "per update {{run}} {{namespace}}"),
                unit="s",
            ),
            curve(
                "Oldest rest",
                "Train steps from the newest tokens of the oldest resting trajectory to the newest policy: 0 or 1, "
                "unless trajectories wait for a place in the pool.",
                rule("oldest_rest_steps:max"),
                limits=above(2, RED),
            ),
            curve(
                "Ready batches",
                "Complete groups that wait, in batches. Below 1 the trainer is about to wait.",
                rule("ready_batches:ratio"),
                limits=above(1, GREEN),
            ),
            curve(
                "Groups through the queue",
                "Admitted, cut into batches (batches times their size) and evicted, per second.",
                per_second("rollmesh_rollout_groups_admitted_total", word="admitted"),
                Query(
                    f"{rate('rollmesh_rollout_batches_cut_total')} * {led('rollmesh_rollout_batch_groups')}",
                    "cut {{run}} {{namespace}}",
                ),
                per_second("rollmesh_rollout_groups_evicted_total", word="evicted"),
            ),
            curve(
                "Paused",
                "Why no rollouts are started, if they are not: an operator, a failure, a recovery, a barrier of the "
                "schedule.",
                rule("paused:max", legend="{{by}} {{run}} {{namespace}}"),
                unit="bool",
                most=1,
            ),
            curve(
                "Memory",
                "Used memory of Redis plus expected writes, as a share of its maxmemory; admission stops at 80%.",
                rule("store_memory_ratio:max"),
                unit="percentunit",
                limits=((None, "transparent"), (0.8, ORANGE), (1, RED)),
            ),
        ],
        "Staleness": [
            density(
                "Staleness when cut",
                "Staleness of groups when their batch is cut, in train steps.",
                "rollmesh_rollout_cut_staleness_steps",
            ),
            curve(
                "Staleness and its bound",
                "Mean of the last batches, the oldest unclaimed group, and the bound that no batch exceeds.",
                rule("cut_staleness_steps:mean_rate5m", word="mean of batches"),
                rule("unclaimed_staleness_steps:max", word="oldest unclaimed"),
                rule("max_staleness_steps:max", word="bound"),
            ),
            curve(
                "Tokens by age",
                "Tokens kept for training, by how many versions old their policy was when they arrived.",
                per_second("rollmesh_rollout_sampled_tokens_total", "age"),
                stacked=True,
            ),
            density(
                "Version span", "Newest minus oldest policy version within a response.", "rollmesh_rollout_version_span"
            ),
            curve(
                "Cut blocked for",
                "Seconds for which a straggler has blocked the next batch; 0 while none does.",
                Query(
                    f"(time() - {led('rollmesh_rollout_cut_blocked_since_timestamp_seconds')})"
                    f" * ({led('rollmesh_rollout_cut_blocked_since_timestamp_seconds')} > bool 0)",
                    "{{run}} {{namespace}}",
                ),
                unit="s",
                limits=above(300, RED),
            ),
        ],
        "Order": [
            curve(
                "Prediction of lengths",
                "Rank correlation of the length of a group with its prompt's history, and with its first member. Below "
                "0.5 for the history, groups start in admission order.",
                Query(led("rollmesh_rollout_length_rank_correlation", "source"), "{{source}} {{run}} {{namespace}}"),
                least=None,
                most=1,
            ),
            curve(
                "Longest first",
                "1 while groups start longest expected first, 0 in admission order.",
                Query(led("rollmesh_rollout_longest_first"), "{{run}} {{namespace}}"),
                unit="bool",
                most=1,
            ),
        ],
        "Drops": [
            curve(
                "Evicted groups",
                "Groups that the leader dropped, per second and by reason.",
                per_second("rollmesh_rollout_groups_evicted_total", "reason"),
            ),
            curve(
                "Groups that begin again",
                "Groups that lost their tokens and started again at once (restarted), or after a wait for a long round "
                "(set aside, then recalled), per second.",
                per_second("rollmesh_rollout_groups_begun_again_total", "kind"),
            ),
            curve(
                "Wasted tokens",
                "Saved tokens dropped: of dropped groups by reason, of members as unscorable, dead or surplus, of "
                "groups that were restarted or set aside.",
                per_second("rollmesh_trainer_wasted_tokens_total", "reason"),
                stacked=True,
            ),
            curve(
                "Share of tokens wasted",
                "The same as shares of the sampled tokens, over half an hour.",
                rule("wasted:ratio_rate30m", legend="{{reason}} {{run}} {{namespace}}"),
                unit="percentunit",
                stacked=True,
            ),
            bars(
                "Trained share by length",
                "Groups that were trained rather than dropped, by length decile: a slope is length bias.",
                rule("trained_share:ratio", legend="decile {{length_decile}} {{run}} {{namespace}}"),
                unit="percentunit",
                most=1,
                limits=((None, RED), (0.8, ORANGE), (0.95, GREEN)),
            ),
            bars(
                "Trained groups by length",
                "Groups trained on since the trainer started, by length decile of their longest trajectory.",
                total("rollmesh_trainer_groups_total", "length_decile", word="decile"),
            ),
            curve(
                "Zero variance in a row",
                "Groups in a row whose rewards were all equal; too many end the run.",
                Query(led("rollmesh_rollout_filtered_in_a_row_groups"), "{{run}} {{namespace}}"),
            ),
            curve("Dead letters", "Failed trajectories, kept for inspection.", rule("dead_letters:max")),
        ],
    },
)
