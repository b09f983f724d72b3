"""Metrics of the rollout service."""

from __future__ import annotations

from rollmesh.rollout.mesh_metrics import MeshMetrics
from rollmesh.runtime.metrics import Metrics
from rollmesh.worker.worker_metrics import WorkerMetrics


class RolloutMetrics(WorkerMetrics):
    """Metrics of the worker, of evaluations and, on the leader, of the whole mesh."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(metrics)
        self._count_evaluations(metrics)
        self.leader = metrics.gauge("rollmesh_rollout_leader", "1 while this replica leads the mesh.")
        self.mesh = MeshMetrics(metrics)

    def _count_evaluations(self, metrics: Metrics) -> None:
        self.evaluations_started = metrics.counter(
            "rollmesh_rollout_evaluations_started_total", "Evaluations claimed by this replica."
        )
        self.evaluations = metrics.counter(
            "rollmesh_rollout_evaluations_total", "Evaluations finished by this replica."
        )
        self.evaluations_given_up = metrics.counter(
            "rollmesh_rollout_evaluations_given_up_total",
            "Evaluations finished without a score because no generator served their version.",
        )
        self.last_evaluation = metrics.gauge(
            "rollmesh_rollout_last_evaluation_timestamp_seconds", "Time of the last evaluation of this replica."
        )
