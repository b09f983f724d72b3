"""Mesh views by hand: name what matters, the rest is an idle mesh at policy 0."""

from dataclasses import replace
from typing import Any

from rollmesh.config import RunConfig
from rollmesh.config.schedule import ScheduleConfig
from rollmesh.config.trainer import TrainerConfig
from rollmesh.mesh import GroupView, MeshView
from rollmesh.scheduling import Schedule
from rollmesh.scheduling.axes import Harvest
from rollmesh.scheduling.presets import PRESETS

from ...kit.records import mesh_view

RUN = RunConfig.model_validate({"name": "views", "folder": "runs/views", "model": {"path": "model"}})


def schedule(preset: str = "copris", train_steps: int = 100, **overrides: object) -> Schedule:
    """Resolve a preset; without ``pool_size`` its pool has the fixed size, also where it is automatic by default."""
    section = ScheduleConfig.model_validate({"preset": preset, "groups_per_batch": 2, "group_size": 2, **overrides})
    # Only this advantage accepts groups of one, and only the others accept parts.
    is_grouped = section.part_groups or (section.harvest or PRESETS[preset].harvest) is Harvest.GROUP
    advantage = "grpo" if is_grouped and section.group_size > 1 else "reinforce_pp"
    trainer = TrainerConfig.model_validate({"train_steps": train_steps, "algorithm": {"advantage": advantage}})
    resolved = Schedule.from_config(RUN.model_copy(update={"schedule": section, "trainer": trainer}))
    return resolved if "pool_size" in overrides else replace(resolved, auto_pool=False)


def group(index: int, min_train_step: int | None = 0, tokens: int = 0) -> GroupView:
    return GroupView(group_id=f"e0-{index}", admission_index=index, min_train_step=min_train_step, token_count=tokens)


def view(
    *,
    ready: list[GroupView] | None = None,
    opened: list[GroupView] | None = None,
    in_training: int = 0,
    unfinished: int | None = None,
    **overrides: object,
) -> MeshView:
    """``in_training`` groups are cut and not trained; ``unfinished`` defaults to every member of the open groups."""
    ready, opened = ready or [], opened or []
    steps, ready_steps = _steps([*ready, *opened]), _steps(ready)
    values = {
        "admitted_unconsumed": len(ready) + len(opened) + in_training,
        "open_groups": len(opened),
        "ready_groups": len(ready),
        "ready": tuple(ready),
        "stalest_open": tuple(sorted(opened, key=lambda g: (g.min_train_step is None, g.min_train_step or 0))),
        "unclaimed_by_step": tuple((step, steps.count(step)) for step in dict.fromkeys(steps)),
        "ready_by_step": tuple((step, ready_steps.count(step)) for step in dict.fromkeys(ready_steps)),
        "leased": 2 * len(opened) if unfinished is None else unfinished,
    }
    return mesh_view(**{**values, **overrides})


def _steps(groups: list[GroupView]) -> list[int]:
    return sorted(g.min_train_step for g in groups if g.min_train_step is not None)


def at_step(step: int, **values: Any) -> MeshView:
    """View of a mesh that has trained, cut and announced the same number of batches."""
    return view(**{"trained_step": step, "cut_step": step, "policy_version": step, "policy_train_step": step, **values})


def traced(trained: int, cut: int, policy: int, opened: int, ready: int, **values: Any) -> MeshView:
    """View of one line of a trace; every group has tokens of the newest policy."""
    return at_step(
        trained,
        cut_step=cut,
        policy_version=policy,
        policy_train_step=policy,
        ready=[group(i, policy) for i in range(ready)],
        opened=[group(100 + i, policy) for i in range(opened)],
        in_training=2 * (cut - trained),
        **values,
    )
