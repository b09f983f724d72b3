"""Leases, partial saves, scores and what becomes of groups, on a real server."""

from __future__ import annotations

import asyncio
import re

import numpy as np
import pytest

from rollmesh.errors import Conflict, DataError, SessionLost, StoreUnavailable
from rollmesh.mesh import Cursor, Desired
from rollmesh.store import Append, Finish, NewGroup, ReleaseReason, Score, TrajectoryStore, WriteStatus
from rollmesh.types import FinishReason, OutcomeKind, Prompt, RewardOutcome

from .store_mesh import UNSCORABLE, Mesh, environment_segment, group, limits, policy, scored, segment
from .truth import read_truth


async def test_the_pool_is_never_exceeded_by_workers_that_lease_at_once(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, pool_size=7)
    await mesh.admit(10)
    sessions = [await store.open_session(f"w{i}") for i in range(5)]
    leased = await asyncio.gather(*(store.lease(s, 4) for s in sessions))
    assert sum(map(len, leased)) == 7
    assert (await store.view()).leased == 7
    assert (await read_truth(store)).problems == []


async def test_partials_of_the_oldest_group_are_leased_before_new_work(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(3)
    first = await store.lease(mesh.session, 5)
    assert [t.trajectory.trajectory_id for t in first] == ["e0-0.0", "e0-0.1", "e0-1.0", "e0-1.1", "e0-2.0"]
    assert all(t.lease_new and t.attempt == 1 for t in first)
    for trajectory_id in ("e0-2.0", "e0-1.0"):
        assert await mesh.append(trajectory_id, 0, 4) == WriteStatus.SAVED
    await store.release(mesh.session, ["e0-2.0", "e0-1.0", "e0-0.1"], ReleaseReason.DRAINED)
    again = await store.lease(mesh.session, 4)
    assert [t.trajectory.trajectory_id for t in again] == ["e0-1.0", "e0-2.0", "e0-0.1", "e0-2.1"]
    assert again[0].trajectory.response_ids.tolist() == [0, 1, 2, 3]
    assert not again[0].lease_new


async def test_a_retried_lease_gets_the_same_trajectories(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(3)
    once = await store.connection.run("lease", mesh.session, "nonce", 2)
    twice = await store.connection.run("lease", mesh.session, "nonce", 2)
    assert once == twice
    assert (await store.view()).leased == 2


async def test_a_lease_whose_answer_was_lost_is_answered_by_the_next_one(
    store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(2)
    commands = store.connection.commands

    async def away(calls: object) -> list[object]:
        raise StoreUnavailable("gone after the script and before the prompts")

    monkeypatch.setattr(store.connection, "commands", away)
    with pytest.raises(StoreUnavailable):
        await store.lease(mesh.session, 3)
    monkeypatch.setattr(store.connection, "commands", commands)
    again = [item.trajectory.trajectory_id for item in await store.lease(mesh.session, 1)]
    assert again == ["e0-0.0", "e0-0.1", "e0-1.0"], "all that the queue counts as held by this session"
    assert [item.trajectory.trajectory_id for item in await store.lease(mesh.session, 3)] == ["e0-1.1"]


async def test_a_lost_lease_is_forgotten_once_the_worker_has_stated_what_it_holds(
    store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(1)
    commands = store.connection.commands

    async def away(calls: object) -> list[object]:
        raise StoreUnavailable("gone")

    monkeypatch.setattr(store.connection, "commands", away)
    with pytest.raises(StoreUnavailable):
        await store.lease(mesh.session, 1)
    monkeypatch.setattr(store.connection, "commands", commands)
    await store.reregister(mesh.session, [], "worker")
    other = await store.open_session("other")
    assert [i.trajectory.trajectory_id for i in await store.lease(other, 1)] == ["e0-0.0"]
    assert [i.trajectory.trajectory_id for i in await store.lease(mesh.session, 2)] == ["e0-0.1"]


async def test_a_repeated_save_changes_nothing_and_another_one_is_refused(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(1)
    await store.lease(mesh.session, 1)
    assert await mesh.append("e0-0.0", 0, 4) == WriteStatus.SAVED
    assert await mesh.append("e0-0.0", 4, 2) == WriteStatus.SAVED
    assert await mesh.append("e0-0.0", 0, 4) == WriteStatus.DUPLICATE
    other = Append(trajectory_id="e0-0.0", token_offset=4, segments=[segment(2, start=77)])
    refused = (await store.append(mesh.session, [other]))[0]
    assert (refused.status, refused.saved_token_count) == (WriteStatus.REFUSED, 6)
    assert await mesh.append("e0-0.0", 9, 2) == WriteStatus.REFUSED
    assert await mesh.finish("e0-0.0", 6, 1) == WriteStatus.SAVED
    assert await mesh.finish("e0-0.0", 6, 1) == WriteStatus.DUPLICATE
    assert await mesh.finish("e0-0.0", 6, 2) == WriteStatus.REFUSED
    assert await mesh.score("e0-0.0", 1.0) == WriteStatus.SAVED
    assert await mesh.score("e0-0.0", 1.0) == WriteStatus.DUPLICATE
    assert await mesh.score("e0-0.0", 0.5) == WriteStatus.REFUSED
    assert (await read_truth(store)).members["e0-0.0"].tokens == 7


async def test_a_stranger_cannot_write(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(1)
    await store.lease(mesh.session, 1)
    stranger = await store.open_session("stranger")
    item = Append(trajectory_id="e0-0.0", token_offset=0, segments=[segment(2)])
    assert (await store.append(stranger, [item]))[0].status == WriteStatus.LOST
    assert await store.release(stranger, ["e0-0.0"], "failed") == 0
    assert await store.fail(stranger, [("e0-0.0", "no")]) == 0
    with pytest.raises(SessionLost):
        await store.lease("0" * 32, 1)


async def test_tokens_of_an_unannounced_version_leave_the_whole_call_without_effect(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(1)
    await store.lease(mesh.session, 2)
    items = [
        Append(trajectory_id="e0-0.0", token_offset=0, segments=[segment(2)]),
        Append(trajectory_id="e0-0.1", token_offset=0, segments=[segment(2, version=9)]),
    ]
    with pytest.raises(Conflict, match="version 9"):
        await store.append(mesh.session, items)
    assert (await read_truth(store)).members["e0-0.0"].tokens == 0


async def test_a_group_keeps_the_smallest_train_step_of_its_tokens(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await store.announce_policy(mesh.trainer, policy(1))
    await store.announce_policy(mesh.trainer, policy(2, train_step=1))
    await store.announce_policy(mesh.trainer, policy(3, train_step=2))
    await mesh.admit(2)
    await store.lease(mesh.session, 4)
    await mesh.append("e0-1.0", 0, 2, version=3)
    await mesh.append("e0-0.0", 0, 2, version=3)
    await mesh.append("e0-0.1", 0, 2, version=2)
    assert [(g.group_id, g.min_train_step) for g in (await store.view()).stalest_open][:2] == [("e0-0", 1), ("e0-1", 2)]
    # Environment tokens are not in the loss; a member that can only begin again takes its tokens with it.
    await store.append(
        mesh.session, [Append(trajectory_id="e0-1.1", token_offset=0, segments=[environment_segment(3)])]
    )
    assert await store.restart(mesh.session, ["e0-0.1"]) == 1
    assert [g.min_train_step for g in (await store.view()).stalest_open if g.min_train_step is not None] == [2, 2]
    truth = await read_truth(store)
    assert truth.problems == []
    assert truth.members["e0-0.1"].tokens == 0


async def test_large_segments_and_prompts_survive_outside_the_inline_limit(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    big_group = group(0, prompt_tokens=40_000)
    await store.admit(mesh.leader, [big_group], Cursor(), Cursor(index=1))
    leased = await store.lease(mesh.session, 2)
    assert np.array_equal(leased[0].trajectory.prompt.token_ids, big_group.prompt.token_ids)
    big = [segment(5), environment_segment(30_000)]
    item = Append(trajectory_id="e0-0.0", token_offset=0, segments=big)
    assert (await store.append(mesh.session, [item]))[0].status == WriteStatus.SAVED
    assert (await store.append(mesh.session, [item]))[0].status == WriteStatus.DUPLICATE
    chunks = await store.connection.command("KEYS", store.connection.keys.of("chunk", "*"))
    assert len(chunks) == 1
    assert await store.connection.command("TTL", chunks[0]) == -1
    await store.release(mesh.session, ["e0-0.0"], "drained")
    partial = (await store.lease(mesh.session, 1))[0].trajectory
    assert partial.response_token_count == 30_005
    assert np.array_equal(partial.segments[1].token_ids, big[1].token_ids)
    await store.evict(mesh.leader, ["e0-0"], "stale")
    assert await store.connection.command("KEYS", store.connection.keys.of("chunk", "*")) == []


async def test_an_expired_upload_is_sent_again(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await store.admit(mesh.leader, [group(0)], Cursor(), Cursor(index=1))
    await store.lease(mesh.session, 1)
    run, calls = store.connection.run, []

    async def expire_once(name: str, *arguments: object) -> object:
        if name == "append" and not calls:
            calls.append(name)
            for key in await store.connection.command("KEYS", store.connection.keys.of("chunk", "*")):
                await store.connection.command("DEL", key)
        return await run(name, *arguments)  # type: ignore[arg-type]

    store.connection.run = expire_once  # type: ignore[method-assign,assignment]
    item = Append(trajectory_id="e0-0.0", token_offset=0, segments=[environment_segment(30_000)])
    assert (await store.append(mesh.session, [item]))[0].status == WriteStatus.SAVED
    assert calls == ["append"]


async def test_an_unscorable_member_is_replaced_and_the_group_completes(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(1)
    first, second = await store.lease(mesh.session, 2)
    await mesh.complete(first, None)
    await mesh.complete(second, 1.0)
    view = await store.view()
    assert (view.open_groups, view.ready_groups, view.pending) == (1, 0, 1)
    replacement = (await store.lease(mesh.session, 1))[0]
    assert replacement.trajectory.trajectory_id == "e0-0.2"
    await mesh.complete(replacement, 0.0)
    await store.cut(mesh.leader, 1, ["e0-0"])
    batch = await store.claim(mesh.trainer, 1, 1.0)
    assert batch is not None
    assert [t.trajectory_id for t in batch.groups[0].trajectories] == ["e0-0.1", "e0-0.2"]


async def test_a_group_without_two_scores_dies_when_replacements_are_used_up(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(1)
    for value in (None, None, None, 1.0):
        await mesh.complete((await store.lease(mesh.session, 1))[0], value)
    view = await store.view()
    assert (view.open_groups, view.ready_groups, view.admitted_unconsumed) == (0, 0, 0)
    drop = (await store.ledger())[0]
    assert (drop.group_id, drop.reason, drop.token_count) == ("e0-0", "too_few_scored", 20)
    assert (await store.counts()).drops == {"too_few_scored": 1}
    assert (await read_truth(store)).problems == []


async def test_a_group_with_two_scores_is_ready_when_replacements_are_used_up(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, group_size=3)
    await mesh.admit(1, needed=3)
    for value in (None, 1.0, None, 0.0, None, None):
        await mesh.complete((await store.lease(mesh.session, 1))[0], value)
    assert [g.group_id for g in (await store.view()).ready] == ["e0-0"]


async def test_equal_rewards_are_filtered_refunded_and_counted_in_a_row(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, filter_zero_variance=True)
    await mesh.admit(4)
    values = [1.0, 1.0, 0.0, -0.0, 0.0, 1.0, 0.5, 0.5]
    for leased, value in zip(await store.lease(mesh.session, 8), values, strict=True):
        await mesh.complete(leased, value)
    view = await store.view()
    assert (view.admitted_unconsumed, view.filtered_in_a_row) == (1, 1)
    assert [g.group_id for g in view.ready] == ["e0-2"]
    assert (await store.counts()).drops == {"filtered_all_right": 2, "filtered_all_wrong": 1}
    assert await store.dropped_groups() == {
        "e0-0": "filtered_all_right",
        "e0-1": "filtered_all_wrong",
        "e0-3": "filtered_all_right",
    }
    assert await store.live_groups() == ["e0-2"]


async def test_a_fixed_value_for_a_time_out_scores_the_trajectory(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(1)
    await store.lease(mesh.session, 2)
    for trajectory_id in ("e0-0.0", "e0-0.1"):
        await mesh.finish(trajectory_id, 0, 2)
    outcome = RewardOutcome(kind=OutcomeKind.TIMED_OUT, message="10 s")
    fixed = Score(trajectory_id="e0-0.0", outcome=outcome, shaped_reward=-0.5, assigned=True)
    other = Score(trajectory_id="e0-0.1", outcome=scored(1.0), shaped_reward=1.0)
    await store.score(mesh.session, [fixed, other])
    await store.cut(mesh.leader, 1, ["e0-0"])
    batch = await store.claim(mesh.trainer, 1, 1.0)
    assert batch is not None
    trajectory = batch.groups[0].trajectories[0]
    assert trajectory.shaped_reward == -0.5
    assert trajectory.outcome == outcome


async def test_a_reward_that_is_not_a_number_is_an_error_of_the_caller(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    with pytest.raises(DataError, match="not a finite number"):
        await mesh.score("e0-0.0", float("nan"))


async def test_an_empty_prompt_is_refused_before_anything_is_admitted(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    empty = Prompt(prompt_id="p7", token_ids=np.empty(0, np.int32), verifier="exact")
    bad = NewGroup(group_id="e0-0", prompt=empty, needed=2, epoch=0, index=0)
    with pytest.raises(DataError, match="p7"):
        await store.admit(mesh.leader, [bad], Cursor(), Cursor(index=1))
    assert await store.cursor() == Cursor()


async def test_leases_without_progress_end_as_a_dead_letter_that_can_be_replayed(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, max_attempts=2)
    await mesh.admit(1)
    for attempt in (1, 2):
        leased = (await store.lease(mesh.session, 1))[0]
        assert (leased.trajectory.trajectory_id, leased.attempt) == ("e0-0.0", attempt)
        if attempt == 1:
            await store.release(mesh.session, ["e0-0.0"], ReleaseReason.PAUSED)
            leased = (await store.lease(mesh.session, 1))[0]
            assert leased.attempt == 1, "a pause is no attempt"
        await store.release(mesh.session, ["e0-0.0"], ReleaseReason.FAILED)
    assert [t.trajectory.trajectory_id for t in await store.lease(mesh.session, 2)] == ["e0-0.1", "e0-0.2"]
    letters = await store.dead_letters()
    assert [(letter.trajectory_id, letter.reason) for letter in letters] == [("e0-0.0", "max_attempts")]
    inspected = (await store.dead_letter("e0-0.0")).trajectory
    assert inspected is not None
    assert inspected.prompt.prompt_id == "0"
    new = await store.replay_dead_letter("e0-0.0")
    assert new == "e0-0r1"
    assert await store.replay_dead_letter("e0-0.0") == new
    assert (await store.view()).open_groups == 2
    assert (await store.dead_letters())[0].replayed_as == new
    assert (await read_truth(store)).problems == []
    assert await store.delete_dead_letter("e0-0.0")
    with pytest.raises(Conflict):
        await store.dead_letter("e0-0.0")


async def test_a_replacement_opened_by_a_burial_comes_before_younger_groups(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, max_attempts=1)
    await mesh.admit(2)
    await store.lease(mesh.session, 1)
    await store.release(mesh.session, ["e0-0.0"], ReleaseReason.FAILED)
    leased = [t.trajectory.trajectory_id for t in await store.lease(mesh.session, 4)]
    assert leased == ["e0-0.1", "e0-0.2", "e0-1.0", "e0-1.1"]


async def test_progress_resets_the_attempts(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, max_attempts=1)
    await mesh.admit(1)
    offset = 0
    for _ in range(4):
        leased = (await store.lease(mesh.session, 1))[0]
        assert (leased.trajectory.trajectory_id, leased.attempt) == ("e0-0.0", 1)
        await mesh.append("e0-0.0", offset, 2)
        offset += 2
        await store.release(mesh.session, ["e0-0.0"], ReleaseReason.FAILED)


async def test_a_failed_trajectory_keeps_its_tokens_in_the_letter(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(1)
    await store.lease(mesh.session, 2)
    await mesh.append("e0-0.0", 0, 4)
    assert await store.fail(mesh.session, [("e0-0.0", "environment gone")]) == 1
    letter = await store.dead_letter("e0-0.0")
    assert letter.trajectory is not None
    assert letter.trajectory.response_token_count == letter.token_count == 4
    assert await mesh.append("e0-0.0", 4, 2) == WriteStatus.LOST
    assert (await store.view()).pending == 1, "a replacement waits"
    assert (await read_truth(store)).problems == []


async def test_a_trajectory_has_one_trace_for_its_whole_life(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(1)
    first = [t.trajectory.traceparent for t in await store.lease(mesh.session, 2)]
    assert len(set(first)) == 2
    assert all(re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-01", trace) for trace in first)
    await store.release(mesh.session, ["e0-0.0", "e0-0.1"], ReleaseReason.DRAINED)
    mesh.session = await store.open_session("another worker")
    again = await store.lease(mesh.session, 2)
    assert [t.trajectory.traceparent for t in again] == first
    for leased in again:
        await mesh.complete(leased, float(leased.trajectory.member_index))
    await store.cut(mesh.leader, 1, ["e0-0"])
    batch = await store.claim(mesh.trainer, 1, 1.0)
    assert batch is not None
    assert [t.traceparent for t in batch.groups[0].trajectories] == first


async def test_a_snapshot_rests_with_its_trajectory_until_that_is_scored(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(1)
    await store.lease(mesh.session, 2)
    await mesh.append("e0-0.0", 0, 3)
    for snapshot in (b"older", b"newer\x00"):
        assert await store.keep_snapshot(mesh.session, "e0-0.0", snapshot)
    stranger = await store.open_session("stranger")
    assert not await store.keep_snapshot(stranger, "e0-0.0", b"stranger's")
    await store.release(mesh.session, ["e0-0.0"], ReleaseReason.DRAINED)
    assert not await store.keep_snapshot(mesh.session, "e0-0.0", b"late")
    assert [t.snapshot for t in await store.lease(mesh.session, 1)] == [b"newer\x00"]
    await mesh.finish("e0-0.0", 3, 1)
    await store.close_session(mesh.session)
    mesh.session = stranger
    assert [t.snapshot for t in await store.lease_scoring(stranger, 1)] == [b"newer\x00"]
    await mesh.score("e0-0.0", 1.0)
    assert not await store.connection.command("HEXISTS", store.connection.keys.of("trajectory", "e0-0.0"), "snapshot")
    await store.lease(stranger, 1)
    await mesh.append("e0-0.1", 0, 3)
    await store.keep_snapshot(stranger, "e0-0.1", b"of tokens that are gone")
    await store.restart(stranger, ["e0-0.1"])
    assert not await store.connection.command("HEXISTS", store.connection.keys.of("trajectory", "e0-0.1"), "snapshot")


async def test_the_oldest_letters_make_room_for_new_ones(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(1)
    await store.lease(mesh.session, 2)
    await mesh.append("e0-0.0", 0, 4)
    await store.fail(mesh.session, [("e0-0.0", "the oldest")])
    keys, command = store.connection.keys, store.connection.command
    newer = [word for number in range(999) for word in (2e15 + number, f"e9-{number}.0")]
    await command("ZADD", keys.single("letters"), *newer)
    await store.fail(mesh.session, [("e0-0.1", "one too many")])
    counts = await store.counts()
    assert (counts.dead_letters, counts.totals["letters_forgotten_total"]) == (1000, 1)
    with pytest.raises(Conflict):
        await store.dead_letter("e0-0.0")
    for kind in ("letter", "letter_segments", "letter_prompt"):
        assert not await command("EXISTS", keys.of(kind, "e0-0.0"))
    assert (await store.dead_letter("e0-0.1")).reason == "one too many"


async def test_a_lease_whose_group_is_dropped_before_its_tokens_are_read_is_no_lease(
    store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(1)
    await store.lease(mesh.session, 1)
    item = Append(trajectory_id="e0-0.0", token_offset=0, segments=[environment_segment(30_000)])
    await store.append(mesh.session, [item])
    await store.release(mesh.session, ["e0-0.0"], ReleaseReason.DRAINED)
    commands = store.connection.commands

    async def evicted_before_the_chunks(calls: list[tuple[str, ...]], what: str = "") -> list[object]:
        if calls and calls[0][0] == "GET" and ":c:" in calls[0][1]:
            await store.evict(mesh.leader, ["e0-0"], "stale")
        return await commands(calls, what)

    monkeypatch.setattr(store.connection, "commands", evicted_before_the_chunks)
    assert await store.lease(mesh.session, 1) == []
    assert (await read_truth(store)).problems == []


async def test_groups_without_two_scores_are_counted_in_a_row(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, filter_zero_variance=True)
    await mesh.admit(4)

    async def complete_group(*values: float | None) -> int:
        for value in values:
            await mesh.complete((await store.lease(mesh.session, 1))[0], value)
        return (await store.view()).unscored_in_a_row

    nothing = (None, None, None, None)
    assert [await complete_group(*nothing), await complete_group(*nothing)] == [1, 2]
    assert await complete_group(1.0, 1.0) == 0, "a filtered group was scored"
    assert await complete_group(*nothing) == 1


async def test_a_closed_session_gives_its_work_back_at_once(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(2)
    await store.lease(mesh.session, 3)
    await mesh.append("e0-0.0", 0, 4)
    await mesh.finish("e0-0.1", 0, 3)
    await store.close_session(mesh.session)
    view = await store.view()
    assert (view.leased, view.partial, view.pending, view.finished) == (0, 1, 2, 1)
    with pytest.raises(SessionLost):
        await store.heartbeat(mesh.session)
    mesh.session = await store.open_session("next")
    waiting = await store.lease_scoring(mesh.session, 4)
    assert [t.trajectory.trajectory_id for t in waiting] == ["e0-0.1"]
    assert waiting[0].trajectory.finish_reason is FinishReason.STOP
    assert waiting[0].trajectory.response_token_count == 3
    assert await mesh.score("e0-0.1", 1.0) == WriteStatus.SAVED
    assert await store.lease_scoring(mesh.session, 4) == []
    assert (await read_truth(store)).problems == []


async def test_a_paused_mesh_leases_nothing(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(1)
    await store.set_user_paused(True)
    assert await store.lease(mesh.session, 1) == []
    assert (await store.view()).user_paused
    await store.set_user_paused(False)
    await store.set_desired(mesh.leader, Desired(pool_size=4, paused=True, reason="barrier"))
    assert await store.lease(mesh.session, 1) == []
    assert (await store.desired()).reason == "barrier"
    await store.set_desired(mesh.leader, Desired(pool_size=4))
    assert len(await store.lease(mesh.session, 1)) == 1


async def test_an_evicted_group_refunds_its_capacity_and_late_results_are_lost(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(2)
    await store.lease(mesh.session, 4)
    await mesh.append("e0-0.0", 0, 6)
    assert await store.evict(mesh.leader, ["e0-0", "e0-0", "unknown"], "straggler") == 1
    assert await store.evict(mesh.leader, ["e0-0"], "straggler") == 0
    view = await store.view()
    assert (view.admitted_unconsumed, view.leased) == (1, 2)
    assert await mesh.append("e0-0.0", 6, 2) == WriteStatus.LOST
    counts = await store.counts()
    assert counts.drops == {"straggler": 1}
    assert counts.dropped_tokens == {"straggler": 6}
    assert (await read_truth(store)).problems == []


async def test_the_ledger_names_the_decile_of_a_dropped_length(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(12)
    leased = await store.lease(mesh.session, 24)
    for at, item in enumerate(leased[:20]):
        await mesh.finish(item.trajectory.trajectory_id, 0, 2 ** (1 + at // 2))
    await mesh.append("e0-10.0", 0, 2000)
    await mesh.append("e0-11.0", 0, 1)
    await store.evict(mesh.leader, ["e0-10", "e0-11"], "stale")
    assert [d.length_decile for d in await store.ledger()] == [9, 0]


async def test_items_may_come_in_any_number(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, pool_size=1000, group_size=4)
    await mesh.admit(150, needed=4)
    leased = []
    while part := await store.lease(mesh.session, 1000):
        leased += part
    ids = [t.trajectory.trajectory_id for t in leased]
    assert len(ids) == len(set(ids)) == 600
    finishes = [
        Finish(trajectory_id=i, token_offset=0, segments=[segment(2)], finish_reason=FinishReason.LENGTH) for i in ids
    ]
    assert {r.status for r in await store.finish(mesh.session, finishes)} == {WriteStatus.SAVED}
    scores = [Score(trajectory_id=i, outcome=UNSCORABLE, shaped_reward=0.0) for i in ids[:4]] + [
        Score(trajectory_id=i, outcome=scored(1.0), shaped_reward=1.0) for i in ids[4:]
    ]
    assert {r.status for r in await store.score(mesh.session, scores)} == {WriteStatus.SAVED}
    view = await store.view()
    assert (view.ready_groups, view.open_groups, view.pending) == (149, 1, 4)
    assert [g.admission_index for g in view.ready[:4]] == [2, 3, 4, 5]
    assert await store.evict(mesh.leader, await store.live_groups(), "stale") == 150
    assert (await read_truth(store)).problems == []


async def test_a_second_start_must_bring_the_same_limits(store: TrajectoryStore) -> None:
    await store.init_run(limits())
    await store.init_run(limits())
    with pytest.raises(Conflict, match="max_staleness: this run was started with 1, not 3"):
        await store.init_run(limits(max_staleness=3))
