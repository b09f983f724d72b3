"""Answers as they look in a run, for tests."""

from __future__ import annotations

from typing import Any

from rollmesh.gateway.mesh_snapshot import MeshSnapshot
from rollmesh.gateway.models.live import MemoryView, Overview, Rates, Staleness
from rollmesh.mesh import Desired, MeshView
from rollmesh.store.queue_types import StoreCounts
from rollmesh.types import GeneratorRecord

from ...kit.records import generator_record, mesh_view


def overview(**changes: Any) -> Overview:
    values: dict[str, Any] = {
        "run": "demo",
        "time": 100.0,
        "age_seconds": 0.0,
        "state": "running",
        "waiting_for": "",
        "paused_by_person": False,
        "train_step": 3,
        "train_steps": 40,
        "cut_step": 4,
        "newest_version": 3,
        "newest_train_step": 3,
        "pinned_version": None,
        "rollback_to": None,
        "pool_size": 24,
        "trajectories": {"pending": 2, "leased": 20, "partial": 1},
        "groups": {"open": 6, "ready": 2, "cut": 0},
        "staleness": Staleness(bound=4, queue=[], trained=[]),
        "drops": [],
        "waste": (),
        "generators": [],
        "generator_count": 0,
        "evaluations": [],
        "memory": MemoryView(used_bytes=1_000_000, max_bytes=0, ratio=0.0),
        "rates": Rates(saved_tokens_per_second=0.0, finished_per_second=0.0, trained_groups_per_second=0.0),
        "report": None,
        "totals": {},
        "workers": 1,
        "dead_letters": 0,
        "services": [],
    }
    return Overview(**{**values, **changes})


def generator(instance_id: str = "one", **changes: Any) -> GeneratorRecord:
    return generator_record(instance_id, **{"policy_version": 3, "running_count": 2, **changes})


def view(**changes: Any) -> MeshView:
    steps = dict.fromkeys(("trained_step", "cut_step", "policy_version", "policy_train_step"), 3)
    groups = {"admitted_unconsumed": 8, "open_groups": 6, "pending": 2, "partial": 1, "leased": 20}
    return mesh_view(**{"now": 100.0, **steps, **groups, "memory_ratio": 0.1, **changes})


def counts(**changes: Any) -> StoreCounts:
    values: dict[str, Any] = {
        "trajectories": {"leased": 20, "pending": 2, "partial": 1},
        "groups": {"open": 6, "ready": 0, "cut": 0},
        "totals": {},
        "drops": {},
        "dropped_tokens": {},
        "drop_deciles": {},
        "scoring_queue": 0,
        "sessions": 1,
        "dead_letters": 0,
        "used_memory_bytes": 10,
        "max_memory_bytes": 100,
    }
    return StoreCounts(**{**values, **changes})


def look(**changes: Any) -> MeshSnapshot:
    values: dict[str, Any] = {
        "view": view(),
        "counts": counts(),
        "desired": Desired(pool_size=24),
        "generators": [generator()],
        "pin": None,
        "rollback_to": None,
        "failure": "",
        "scale_requests": {},
        "workers": {"s1": "rollout-0"},
        "domains": {},
    }
    return MeshSnapshot(**{**values, **changes})
