"""Calls that are refused leave the queue as it was, and lists of any length do not break a script half-way."""

import re
from typing import Any

import pytest

from rollmesh.config import RunConfig
from rollmesh.config.fixed_settings import reason_to_keep
from rollmesh.config.schedule import ScheduleConfig
from rollmesh.errors import Conflict, SessionLost
from rollmesh.mesh import RunLimits
from rollmesh.scheduling import run_limits
from rollmesh.store import Finish, TrajectoryStore
from rollmesh.store.scripts import RunUnknown
from rollmesh.types import FinishReason

from .store_mesh import Mesh, changed, dump, limits, segment

MANY = 9_000
"""More words than Lua can hand on at once."""


@pytest.mark.parametrize(
    ("script", "arguments", "error"),
    [
        ("init_run", (0, "train_steps", 200, "group_size", 3), Conflict),
        ("open_trainer_session", ("fenced", "trainer", "lineage"), SessionLost),
        ("reregister", ("stranger", "worker", "", "e0-0.0", 0, 3, "0" * 16), SessionLost),
        ("pin_policy", (7, "", ""), Conflict),
    ],
)
async def test_a_refused_call_changes_nothing(
    store: TrajectoryStore, script: str, arguments: tuple[Any, ...], error: type[Exception]
) -> None:
    await store.limits.init_run(limits())
    await store.connection.run("open_trainer_session", "fenced", "older", "")
    await store.connection.run("open_trainer_session", "newest", "newer", "")
    before = await dump(store)
    with pytest.raises(error):
        await store.connection.run(script, *arguments)
    assert changed(before, await dump(store)) == []


async def test_nothing_is_asserted_again_of_a_run_that_redis_does_not_know(store: TrajectoryStore) -> None:
    for script, arguments in (
        ("reassert_groups", ("trainer", 1, "digest", 1, "e0-0")),
        ("reassert_done", ("trainer", 1, 1, 1, 0, 4, "server")),
    ):
        with pytest.raises(RunUnknown):
            await store.connection.run(script, *arguments)
    assert await dump(store) == {}


async def test_a_rollout_of_many_saves_begins_again_and_goes(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups=1, leased=2)
    for trajectory_id in ("e0-0.0", "e0-0.1"):
        await mesh.append(trajectory_id, 0, 3)
    key = store.connection.keys.of("trajectory", "e0-0.1")
    saves = [word for at in range(MANY) for word in (f"d{at}", "digest")]
    await store.connection.command("HSET", key, "links", " ".join(map(str, range(MANY))), *saves)
    assert await store.trajectories.restart(mesh.session, ["e0-0.0", "e0-0.1"]) == [1, 1]
    assert (await store.mesh.counts()).totals["restarted_tokens_total"] == 6
    assert not [f for f in await store.connection.command("HKEYS", key) if f.startswith(b"d")]
    await mesh.append("e0-0.1", 0, 3)
    await store.connection.command("HSET", key, "links", " ".join(map(str, range(MANY))))
    assert await store.leadership.evict(mesh.leader, ["e0-0"], "stale") == 1


async def test_a_turn_of_many_segments_is_saved_whole(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups=1, leased=2)
    items = [
        Finish(trajectory_id=i, token_offset=0, segments=[segment(1)] * number, finish_reason=FinishReason.STOP)
        for i, number in (("e0-0.0", 1), ("e0-0.1", MANY))
    ]
    results = await store.trajectories.finish(mesh.session, items)
    assert [(r.status, r.saved_token_count) for r in results] == [(1, 1), (1, MANY)]
    assert await store.connection.command("LLEN", store.connection.keys.of("segments", "e0-0.1")) == MANY


CHANGES: dict[str, tuple[dict[str, Any], Any]] = {
    "preset": ({"preset": "copris", "pool_size": 128}, "areal"),
    "groups_per_batch": ({"preset": "april"}, 8),
    "group_size": ({"preset": "sorted"}, 4),
    "harvest": ({"preset": "sorted_partial"}, "group"),
    "spare_members": ({"preset": "april"}, 1),
    "wave_batches": ({"preset": "april"}, 2),
    "spare_groups": ({"preset": "april"}, 3),
    "window_groups": ({"preset": "april"}, 90),
    "pool_size": ({"preset": "copris"}, "auto"),
    "max_staleness": ({"preset": "april", "window_groups": 96}, 6),
    "on_stale": ({"preset": "copris"}, "evict"),
    "straggler_timeout_seconds": ({}, 60.0),
    "part_groups": ({"preset": "sync"}, 4),
    "segment_tokens": ({"preset": "april"}, 128),
    "start_order": ({"preset": "copris"}, "longest_expected"),
    "resume_order": ({"preset": "copris"}, "nearest_end"),
    "cut_order": ({"preset": "copris"}, "oldest"),
    "filter_zero_variance": ({"preset": "copris"}, True),
    "max_filtered_in_a_row": ({}, 7),
}
"""Schedule of the run and the new value, by field."""


def limits_of(schedule: dict[str, Any]) -> RunLimits:
    by_batch = schedule.get("preset", "").startswith("sorted")
    algorithm = {"advantage": "reinforce_pp" if by_batch else "grpo"}
    return run_limits(
        RunConfig.model_validate(
            {
                "name": "continued",
                "folder": "runs/continued",
                "model": {"path": "model"},
                "schedule": schedule,
                "rollout": {"max_new_tokens": 256},
                "trainer": {"algorithm": algorithm},
            }
        )
    )


def test_every_setting_of_a_schedule_is_changed_below() -> None:
    assert CHANGES.keys() == ScheduleConfig.model_fields.keys()


@pytest.mark.parametrize("field", CHANGES)
async def test_a_continued_run_refuses_a_changed_schedule_by_the_name_of_the_field(
    store: TrajectoryStore, field: str
) -> None:
    schedule, value = CHANGES[field]
    await store.limits.init_run(limits_of(schedule))
    await store.limits.init_run(limits_of(schedule))
    changed = limits_of(schedule | {field: value})
    if reason_to_keep(f"schedule.{field}") is None:
        await store.limits.init_run(changed)
        return
    with pytest.raises(Conflict, match=rf"(^|; )schedule\.{field}: this run was started with .*, not "):
        await store.limits.init_run(changed)
    await store.limits.init_run(limits_of(schedule))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"preset": "copris", "group_size": 8}, {"preset": "areal", "group_size": 4}),
        ({"preset": "sorted"}, {"harvest": "group"}),
        ({"preset": "copris", "pool_size": 64}, {"on_stale": "mask_old_segments"}),
        ({"preset": "copris", "pool_size": 64}, {"resume_order": "nearest_end"}),
    ],
)
async def test_a_refusal_names_every_changed_setting_once_and_no_other(
    store: TrajectoryStore, before: dict[str, Any], after: dict[str, Any]
) -> None:
    await store.limits.init_run(limits_of(before))
    with pytest.raises(Conflict) as error:
        await store.limits.init_run(limits_of(before | after))
    named = [part.partition(": this run was started with ")[0] for part in str(error.value).split("; ")]
    assert sorted(named) == sorted(f"schedule.{field}" for field in after)


async def test_a_client_that_only_reads_restores_a_lost_run_with_its_settings(
    store: TrajectoryStore, another_client: TrajectoryStore
) -> None:
    await store.limits.init_run(limits_of({"preset": "copris"}))
    await another_client.limits.get()
    await store.connection.command("FLUSHALL")
    await another_client.mesh.view()
    with pytest.raises(Conflict, match=re.escape("schedule.on_stale: this run was started with pace, not evict")):
        await store.limits.init_run(limits_of({"preset": "copris", "on_stale": "evict"}))
