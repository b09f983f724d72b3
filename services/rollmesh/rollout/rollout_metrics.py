"""What the rollout service exports."""

from __future__ import annotations

from rollmesh.rollout.mesh_metrics import MeshMetrics
from rollmesh.runtime.metrics import Metrics
from rollmesh.worker.worker_metrics import WorkerMetrics


class RolloutMetrics(WorkerMetrics):
    """Counters of the worker, evaluations and, on the leader, gauges of the whole mesh."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(metrics)
        self._count_evaluations(metrics)
        self.leader = metrics.gauge("rollmesh_rollout_leader", "1 while this replica leads the mesh.")
        self.mesh = MeshMetrics(metrics)

    def _count_evaluations(self, metrics: Metrics) -> None:
        self.evaluations_started = metrics.counter(
            "rollmesh_rollout_evaluations_started_total", "Evaluations claimed here."
        )
        self.evaluations = metrics.counter("rollmesh_rollout_evaluations_total", "Evaluations finished here.")
        self.evaluations_given_up = metrics.counter(
            "rollmesh_rollout_evaluations_given_up_total",
            "Evaluations without a score: no generator came to serve their version. They are finished, too.",
        )
        self.last_evaluation = metrics.gauge(
            "rollmesh_rollout_last_evaluation_timestamp_seconds", "When an evaluation was last finished here."
        )
