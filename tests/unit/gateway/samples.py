"""Answers as they look in a run, for tests."""

from typing import Any

from rollmesh.gateway.curves import Curves
from rollmesh.gateway.mesh_snapshot import MeshSnapshot, build_overview
from rollmesh.gateway.models.live import Overview, Rates
from rollmesh.mesh import Desired, MeshView
from rollmesh.scheduling import Schedule
from rollmesh.store.queue_types import StoreCounts
from rollmesh.types import GeneratorRecord

from ...kit.records import generator_record, mesh_view, store_counts
from ...kit.run_files import made_run

_FIELDS = {"groups_per_batch": 4, "group_size": 4, "pool_size": 24, "max_staleness": 4}
SCHEDULE = Schedule.from_config(made_run(schedule=_FIELDS))


def generator(instance_id: str = "one", **changes: Any) -> GeneratorRecord:
    return generator_record(instance_id, **{"policy_version": 3, "running_count": 2, **changes})


def view(**changes: Any) -> MeshView:
    steps = dict.fromkeys(("trained_step", "cut_step", "policy_version", "policy_train_step"), 3)
    groups = {"admitted_unconsumed": 8, "open_groups": 6, "pending": 2, "partial": 1, "leased": 20}
    return mesh_view(**{"now": 100.0, **steps, **groups, "memory_ratio": 0.1, **changes})


def counts(**changes: Any) -> StoreCounts:
    trajectories, groups = {"leased": 20, "pending": 2, "partial": 1}, {"open": 6, "ready": 0, "cut": 0}
    memory = {"used_memory_bytes": 10, "max_memory_bytes": 100}
    return store_counts(**{"trajectories": trajectories, "groups": groups, "sessions": 1, **memory, **changes})


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


def built(one: MeshSnapshot, **changes: Any) -> Overview:
    values: dict[str, Any] = {
        "run": "demo",
        "schedule": SCHEDULE,
        "rates": Rates(),
        "curves": Curves(),
        "evaluations": [],
        "running": {},
    }
    return build_overview(one, **{**values, **changes})
