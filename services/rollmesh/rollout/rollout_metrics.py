"""Metrics of the whole mesh, updated by the leader; the gauges of other replicas keep their last value or 0.

In PromQL, read them where ``rollmesh_rollout_leader`` is 1, as the recording rules of the chart do.
"""

import math
from collections.abc import Sequence

from rollmesh.mesh import Desired, DropReason, MeshView, WasteReason
from rollmesh.runtime.metrics import STALENESS_BUCKETS, Metrics
from rollmesh.scheduling import Schedule
from rollmesh.scheduling.auto_pool import trainer_pool
from rollmesh.scheduling.length_prediction import LengthEvidence
from rollmesh.store.queue_types import StoreCounts
from rollmesh.worker.worker_metrics import WorkerMetrics

_TRAJECTORY_STATES = ("pending", "partial", "resting", "leased", "finished")
_GROUP_STATES = ("open", "ready", "cut", "aside")
_STEP_KINDS = ("trained", "cut", "last")
_POOL_BOUNDS = ("trainer", "caches")
_PAUSES = ("person", "launcher", "failure", "recovery", "barrier")
_EVICTION_REASONS = (DropReason.STALE, DropReason.STRAGGLER_TIMEOUT, DropReason.RUN_COMPLETE)
_BEGUN_AGAIN = (WasteReason.RESTARTED, WasteReason.SET_ASIDE, "recalled")


class MeshMetrics:
    """Gauges of the mesh, of its queue and of its store; counters of the leader's decisions."""

    def __init__(self, metrics: Metrics) -> None:
        self._show_queue(metrics)
        self._show_limits(metrics)
        self._show_store(metrics)
        self._count_decisions(metrics)
        self._show_predictions(metrics)

    def _show_queue(self, metrics: Metrics) -> None:
        self._trajectories = metrics.gauge(
            "rollmesh_rollout_queue_trajectories",
            "Trajectories of open groups, by state.",
            {"state": _TRAJECTORY_STATES},
        )
        self._groups = metrics.gauge(
            "rollmesh_rollout_queue_groups", "Admitted, untrained groups, by state.", {"state": _GROUP_STATES}
        )
        self._oldest_rest = metrics.gauge(
            "rollmesh_rollout_oldest_rest_steps",
            "Train steps from the newest tokens of the oldest resting trajectory to the newest policy; 0 without one.",
        )
        self._steps = metrics.gauge(
            "rollmesh_rollout_train_step",
            "Newest train step that was trained or cut, and the last one of the run, by kind.",
            {"kind": _STEP_KINDS},
        )
        self._policy = metrics.gauge("rollmesh_rollout_policy_version", "Newest announced policy version.")
        self._paused = metrics.gauge("rollmesh_rollout_paused", "1 while no rollouts start, by cause.", {"by": _PAUSES})
        self._complete = metrics.gauge("rollmesh_rollout_run_complete", "1 once the run's last step has been trained.")
        self._filtered = metrics.gauge("rollmesh_rollout_filtered_in_a_row_groups", "Zero-variance groups in a row.")
        self._unclaimed_staleness = metrics.gauge(
            "rollmesh_rollout_unclaimed_staleness_steps",
            "Staleness of the oldest open or ready group if the next batch trained it.",
        )
        self._blocked = metrics.gauge(
            "rollmesh_rollout_cut_blocked_since_timestamp_seconds",
            "Time since which stragglers block the cut; 0 if none do.",
        )

    def _show_limits(self, metrics: Metrics) -> None:
        self._max_staleness = metrics.gauge(
            "rollmesh_rollout_max_staleness_steps", "Staleness bound of the run, in train steps."
        )
        self._pool = metrics.gauge(
            "rollmesh_rollout_pool_trajectories", "Trajectories that may be leased at once over the whole mesh."
        )
        self._pool_bound = metrics.gauge(
            "rollmesh_rollout_auto_pool_bound_trajectories",
            "Bounds of an automatic pool: the trainer's pace, the generators' caches; NaN with a fixed pool.",
            {"by": _POOL_BOUNDS},
        )
        self._ready_time = metrics.gauge(
            "rollmesh_rollout_ready_seconds",
            "Time from the admission of groups to their end, per ready group, over about two batches.",
        )
        self._update_time = metrics.gauge(
            "rollmesh_rollout_update_seconds",
            "Time of the trainer from a batch to the announced policy, waits left out, over about four updates.",
        )
        for by in _POOL_BOUNDS:
            self._pool_bound.labels(by=by).set(math.nan)
        self._ready_time.set(math.nan)
        self._update_time.set(math.nan)
        self._batch = metrics.gauge("rollmesh_rollout_batch_groups", "Groups that one train step consumes.")

    def _show_store(self, metrics: Metrics) -> None:
        self._memory = metrics.gauge(
            "rollmesh_rollout_store_memory_ratio",
            "Store memory in use, plus the expected writes of unfinished trajectories, over its limit.",
        )
        self._used = metrics.gauge("rollmesh_rollout_store_used_memory_bytes", "Memory used by Redis.")
        self._most = metrics.gauge(
            "rollmesh_rollout_store_max_memory_bytes", "Memory that Redis may use; 0 without a limit."
        )
        self._sessions = metrics.gauge("rollmesh_rollout_store_sessions", "Living worker sessions of the run.")
        self._letters = metrics.gauge("rollmesh_rollout_dead_letters", "Dead letters of the run.")
        self._letters_written = metrics.gauge(
            "rollmesh_rollout_dead_letters_written", "Dead letters of the run so far, those deleted since included."
        )
        self._orphans = metrics.gauge(
            "rollmesh_rollout_unheld_scoring_trajectories",
            "Finished trajectories without outcome that no worker has leased.",
        )

    def _count_decisions(self, metrics: Metrics) -> None:
        self._staleness = metrics.histogram(
            "rollmesh_rollout_cut_staleness_steps",
            "Staleness of groups when their batch is cut.",
            buckets=STALENESS_BUCKETS,
        )
        self._cut_time = metrics.gauge("rollmesh_rollout_last_cut_timestamp_seconds", "Time of the last cut.")
        self._cut_batches = metrics.counter("rollmesh_rollout_batches_cut_total", "Batches cut by this leader.")
        self.admitted = metrics.counter("rollmesh_rollout_groups_admitted_total", "Groups opened by this leader.")
        self.evicted = metrics.counter(
            "rollmesh_rollout_groups_evicted_total",
            "Groups dropped by this leader, by reason.",
            {"reason": _EVICTION_REASONS},
        )
        self.begun_again = metrics.counter(
            "rollmesh_rollout_groups_begun_again_total",
            "Groups that this leader restarted, set aside, or recalled after that, by kind.",
            {"kind": _BEGUN_AGAIN},
        )

    def _show_predictions(self, metrics: Metrics) -> None:
        self._correlation = metrics.gauge(
            "rollmesh_rollout_length_rank_correlation",
            "Spearman correlation of the length of a group with the mean length of its prompt's earlier trajectories "
            "(history), and of its first member with the others (siblings); NaN before 32 groups.",
            ("source",),
        )
        self._longest_first = metrics.gauge(
            "rollmesh_rollout_longest_first", "1 while groups start longest expected first, 0 in admission order."
        )
        self._history = metrics.gauge("rollmesh_rollout_history_prompts", "Prompts with a record of their groups.")
        for source in ("history", "siblings"):
            self._correlation.labels(source=source).set(math.nan)

    def predicted(self, evidence: LengthEvidence, prompts: int) -> None:
        """Set the gauges of the prompt history; ``prompts`` have a record."""
        for source, value in (("history", evidence.history), ("siblings", evidence.siblings)):
            self._correlation.labels(source=source).set(math.nan if value is None else value)
        self._longest_first.set(int(evidence.history_predicts))
        self._history.set(prompts)

    def limits(self, schedule: Schedule) -> None:
        """Set the gauges of the run's limits; an automatic pool is 0 on a replica that does not lead."""
        self._max_staleness.set(schedule.max_staleness)
        self._pool.set(0 if schedule.auto_pool else schedule.pool_size)
        self._batch.set(schedule.groups_per_batch)
        self._steps.labels(kind="last").set(schedule.train_steps)

    def pool(self, schedule: Schedule, view: MeshView, desired: Desired) -> None:
        """Set the gauges of the pool: its size, its bounds and the times that they follow from."""
        self._ready_time.set(math.nan if view.ready_seconds is None else view.ready_seconds)
        self._update_time.set(math.nan if view.update_seconds is None else view.update_seconds)
        self._pool.set(desired.pool_size + view.beyond_pool)
        if not schedule.auto_pool:
            return
        self._pool_bound.labels(by="trainer").set(trainer_pool(schedule, view))
        by_caches = math.nan if desired.cache_pool is None else desired.cache_pool.size
        self._pool_bound.labels(by="caches").set(by_caches)

    def update(self, view: MeshView) -> None:
        """Set the gauges of the mesh from one view."""
        for state in _TRAJECTORY_STATES:
            self._trajectories.labels(state=state).set(getattr(view, state))
        cut = view.admitted_unconsumed - view.open_groups - view.ready_groups
        sizes = (view.open_groups, view.ready_groups, cut, view.aside_groups)
        for state, groups in zip(_GROUP_STATES, sizes, strict=True):
            self._groups.labels(state=state).set(groups)
        self._steps.labels(kind="trained").set(view.trained_step)
        self._steps.labels(kind="cut").set(view.cut_step)
        self._policy.set(view.policy_version)
        self._complete.set(int(view.is_complete))
        self._memory.set(view.memory_ratio)
        self._filtered.set(view.filtered_in_a_row)
        self._unclaimed_staleness.set(unclaimed_staleness(view))
        self._blocked.set(view.blocked_since or 0.0)

    def paused(self, view: MeshView, *, desired: bool, failed: bool) -> None:
        """Set the gauges of the pause by cause; ``desired`` is True for any cause, ``failed`` if the run has failed."""
        causes = {
            "person": view.user_paused,
            "launcher": view.launcher_paused,
            "failure": failed,
            "recovery": view.recovering,
        }
        causes["barrier"] = desired and not any(causes.values()) and not view.is_complete
        for by, active in causes.items():
            self._paused.labels(by=by).set(int(active))

    def counted(self, counts: StoreCounts, policy_train_step: int) -> None:
        """Set the gauges of the store; ``policy_train_step`` is that of the newest policy."""
        since = policy_train_step if counts.oldest_rest_step is None else counts.oldest_rest_step
        self._oldest_rest.set(max(0, policy_train_step - since))
        self._used.set(counts.used_memory_bytes)
        self._most.set(counts.max_memory_bytes)
        self._sessions.set(counts.sessions)
        self._letters.set(counts.dead_letters)
        self._letters_written.set(counts.totals.get("dead_total", 0))
        self._orphans.set(counts.scoring_queue)

    def cut(self, staleness: Sequence[int]) -> None:
        """Count a cut batch; ``staleness`` of its groups is in train steps."""
        for value in staleness:
            self._staleness.observe(value)
        self._cut_batches.inc()
        self._cut_time.set_to_current_time()


def unclaimed_staleness(view: MeshView) -> int:
    """Return the train steps from the oldest token of an open or ready group to the next batch; 0 without tokens."""
    steps = [step for step, groups in view.unclaimed_by_step if groups]
    return max(0, view.cut_step - min(steps)) if steps else 0


class RolloutMetrics(WorkerMetrics):
    """Metrics of the worker and, on the leader, of the whole mesh."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(metrics)
        self.leader = metrics.gauge("rollmesh_rollout_leader", "1 while this replica leads the mesh.")
        self.mesh = MeshMetrics(metrics)
