"""Metrics of the gateway."""

from __future__ import annotations

from rollmesh.runtime.metrics import Metrics

ACTIONS = ("pause", "resume", "pin", "unpin", "rollback", "replay", "delete_letter", "scale")


class GatewayMetrics:
    """Metrics of events, polls and actions; ``RequestMetrics`` has those of the requests."""

    def __init__(self, metrics: Metrics) -> None:
        self.event_clients = metrics.gauge("rollmesh_gateway_event_clients", "Clients connected to the live events.")
        self.events = metrics.counter(
            "rollmesh_gateway_events_total", "Live events sent, by kind.", {"kind": ("snapshot", "tick")}
        )
        self.look_seconds = metrics.histogram("rollmesh_gateway_look_seconds", "Duration of a poll of the mesh.")
        self.look_failures = metrics.counter("rollmesh_gateway_look_failures_total", "Polls of the mesh that failed.")
        self.last_look = metrics.gauge(
            "rollmesh_gateway_last_look_timestamp_seconds", "Unix time of the last successful poll of the mesh."
        )
        self.left_out = metrics.gauge(
            "rollmesh_gateway_left_out_trajectories", "Trajectories in progress that do not fit in the timeline."
        )
        self.actions = metrics.counter("rollmesh_gateway_actions_total", "Actions taken, by kind.", {"action": ACTIONS})
