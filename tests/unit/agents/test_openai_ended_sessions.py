"""A session in use does not end as idle; an ended one keeps its ids, counts and marks, and releases its tokens."""

import asyncio
import gc
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rollmesh.agents import recorded_calls, session_rewards
from rollmesh.agents.agent_session import UNWANTED, AgentGone, AgentSession, EndedSession
from rollmesh.agents.agents_metrics import OpenAiMetrics
from rollmesh.agents.agents_service import Agents, OpenAiService
from rollmesh.agents.context_match import TurnMark
from rollmesh.agents.openai_errors import Elsewhere, OpenAiError
from rollmesh.agents.openai_requests import RewardRequest
from rollmesh.agents.recorded_calls import RecordedCalls
from rollmesh.agents.session_manager import SessionManager
from rollmesh.agents.session_rewards import Rewards, check_repeated
from rollmesh.config.rollout import RolloutConfig
from rollmesh.errors import Conflict, StoreUnavailable
from rollmesh.runtime.metrics import Metrics
from rollmesh.store.queue_types import AgentPlace, Fork, ReleaseReason
from rollmesh.types import ForkStatus
from rollmesh.worker.active_trajectory import ActiveTrajectory, LetGo

from .sessions_for_tests import TOKENS, held_trajectory, opened_session, rollout_of, sampled


async def ended_session(desk: SessionManager, number: int, how: str) -> tuple[str, weakref.ref[ActiveTrajectory]]:
    """Open a session, sample into it, end it; returns its id and a weak reference to its tokens."""
    held = held_trajectory(number)
    session, run = await opened_session(desk, rollout_of(held))
    desk.end(session, how)
    with pytest.raises(AgentGone):
        await run
    return session.session_id, weakref.ref(held)


@pytest.mark.parametrize("how", ["given_up", "idle", "lost"])
async def test_an_ended_session_releases_its_tokens_and_keeps_ids_and_counts(how: str) -> None:
    desk = SessionManager(OpenAiMetrics(Metrics("gateway")), RolloutConfig())
    sessions = [await ended_session(desk, number, how) for number in range(5)]
    await asyncio.sleep(0)  # the loop lets go of the last task and its exception
    gc.collect()
    for number, (session_id, tokens) in enumerate(sessions):
        assert tokens() is None, "the tokens of an ended session are still in memory"
        found = desk.find(session_id)
        assert found is not None and found.ended == how
        shown = found.describe("run")  # type: ignore[call-arg]
        assert shown["trajectories"] == [{"id": f"e0-{number}.0", "tokens": TOKENS, "policy_versions": [3]}]
        assert (shown["model"], shown["state"], shown["idle_seconds_left"]) == ("run", how, 0.0)


async def test_an_agent_whose_lease_is_lost_before_the_first_mark_gets_the_next_trajectory() -> None:
    desk = SessionManager(OpenAiMetrics(Metrics("gateway")), RolloutConfig())

    async def lost(*_: Any) -> None:
        assert not desk.sessions, "a session that nobody has heard of is not counted"
        raise LetGo("the lease is lost")

    opened = asyncio.create_task(desk.waiting.session(60.0))
    while not desk.waiting.wanted():
        await asyncio.sleep(0)
    desk.waiting.work_due.clear()
    with pytest.raises(LetGo):
        await desk.run(rollout_of(held_trajectory(0), keep_snapshot=lost))
    assert (desk.waiting.wanted(), desk.waiting.work_due.is_set(), desk.sessions) == (1, True, [])
    assert not desk._teams, "a session that never began leaves nothing behind"
    # The next lease of the same trajectory waits for no agent, and serves the one that waits.
    run = asyncio.create_task(desk.run(rollout_of(held_trajectory(0))))
    session = await opened
    assert session is not None and desk.sessions == [session] and session.newest.trajectory_id == "e0-0.0"
    desk.end(session, "given_up")
    with pytest.raises(AgentGone):
        await run


async def test_a_reward_for_a_session_that_ended_without_one_is_refused() -> None:
    desk = SessionManager(OpenAiMetrics(Metrics("gateway")), RolloutConfig())
    session_id, _ = await ended_session(desk, 0, "idle")
    found = desk.find(session_id)
    assert isinstance(found, EndedSession)
    with pytest.raises(OpenAiError, match="idle_timeout_seconds"):
        check_repeated(found, RewardRequest(reward=1.0))


async def test_a_new_lease_that_lacks_a_turn_just_begun_continues_the_session_before_it() -> None:
    down = False

    async def keep_snapshot(*_: Any) -> None:
        if down:
            raise StoreUnavailable("no answer")

    desk = SessionManager(OpenAiMetrics(Metrics("gateway")), RolloutConfig())
    held = held_trajectory(0)
    session, run = await opened_session(desk, rollout_of(held, keep_snapshot))
    session.newest.begin_turn(TurnMark(characters=1, digest="", at=TOKENS + 1))  # its message is not saved yet
    down = True
    held.mark_registered(TOKENS)
    with pytest.raises(StoreUnavailable):
        await run
    again = held_trajectory(0)
    again.add(sampled(3))
    leased = rollout_of(again)
    run = asyncio.create_task(desk.run(leased))
    while session.newest.rollout is not leased and not run.done():
        await asyncio.sleep(0)
    assert not session.ended and session.newest.turn_mark is None
    desk.end(session, "given_up")
    with pytest.raises(AgentGone):
        await run


async def test_an_agent_whose_name_another_replica_has_opened_leaves_its_prompt_to_the_next_one() -> None:
    names = ["episode 7", ""]

    async def keep_snapshot(*_: Any) -> None:
        if names.pop(0):
            raise Conflict("another session has the name")

    desk = SessionManager(OpenAiMetrics(Metrics("gateway")), RolloutConfig())
    first, second = [asyncio.create_task(desk.waiting.session(60.0, name)) for name in names]
    while desk.waiting.wanted() < 2:
        await asyncio.sleep(0)
    run = asyncio.create_task(desk.run(rollout_of(held_trajectory(0), keep_snapshot)))
    session = await second
    assert session is not None and await first is None, "it looks again, and finds the session"
    desk.end(session, "given_up")
    with pytest.raises(AgentGone):
        await run


async def silent_for_long(session: AgentSession) -> None:
    """Move the last use of a session past its idle timeout, and let its trajectories see it."""
    session.last_use -= 2 * session.idle_seconds
    for trajectory in session.trajectories:
        trajectory.notify()
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_call_whose_lease_is_lost_before_it_samples_ends_at_once() -> None:
    held = held_trajectory(0)
    desk = SessionManager(OpenAiMetrics(Metrics("gateway")), RolloutConfig())
    session, run = await opened_session(desk, rollout_of(held))
    trajectory = session.newest
    trajectory.busy = True
    held.lose("another worker has leased it")
    with pytest.raises(OpenAiError, match="another worker has leased it"):
        await asyncio.wait_for(trajectory.wait_ready(time.monotonic() + 3600.0), 60)
    trajectory.busy = False
    trajectory.notify()
    with pytest.raises(LetGo):
        await run
    assert session.ended == "lost"


async def test_a_session_is_not_idle_while_a_call_holds_it() -> None:
    desk = SessionManager(OpenAiMetrics(Metrics("gateway")), RolloutConfig())
    session, run = await opened_session(desk, rollout_of(held_trajectory(0)))
    async with session.lock:  # as a call of another trajectory holds it, or one that waits for a lease
        await silent_for_long(session)
        assert not run.done() and not session.ended
        assert 599.0 < session.describe("run", with_task=False)["idle_seconds_left"] <= 600.0
        session.touch()
    await asyncio.sleep(0)
    assert session.deadline > time.monotonic() + 590.0, "the idle time counts from the end of the call"
    await silent_for_long(session)
    with pytest.raises(AgentGone, match="idle"):
        await run
    assert session.ended == "idle"


async def test_the_idle_time_counts_from_the_end_of_a_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_rewards, "_LEASE_WAIT_SECONDS", 0.1)
    desk = SessionManager(OpenAiMetrics(Metrics("gateway")), RolloutConfig())
    held = held_trajectory(0)
    session, run = await opened_session(desk, rollout_of(held))
    held.park(ReleaseReason.PAUSED)
    post = asyncio.create_task(Rewards(desk, 2 * TOKENS, "trajectory").post(session, RewardRequest(reward=1.0)))
    while not session.lock.locked():
        await asyncio.sleep(0)
    await silent_for_long(session)
    with pytest.raises(OpenAiError, match="no lease"):
        await post
    await asyncio.sleep(0)
    assert not run.done() and session.deadline > time.monotonic() + 590.0
    desk.end(session, "given_up")
    with pytest.raises(AgentGone):
        await run


async def test_a_session_given_up_before_its_reward_is_stored_is_not_trained() -> None:
    saving, saved = asyncio.Event(), asyncio.Event()

    async def keep_snapshot(*_: Any) -> None:
        if held.token_count:  # the mark with the reward
            saving.set()
            await saved.wait()

    desk = SessionManager(OpenAiMetrics(Metrics("gateway")), RolloutConfig())
    held = held_trajectory(0)
    session, run = await opened_session(desk, rollout_of(held, keep_snapshot))
    post = asyncio.create_task(Rewards(desk, 2 * TOKENS, "trajectory").post(session, RewardRequest(reward=1.0)))
    await saving.wait()
    desk.end(session, "given_up")
    saved.set()
    with pytest.raises(AgentGone, match="given_up"):
        await run
    held.close()
    with pytest.raises(OpenAiError) as gone:
        await post
    assert gone.value.code == "session_ended"


@pytest.mark.parametrize("how", ["given_up", UNWANTED])
async def test_the_late_end_of_a_trajectory_leaves_a_later_one_with_its_id_to_its_session(how: str) -> None:
    desk = SessionManager(OpenAiMetrics(Metrics("gateway")), RolloutConfig())
    session, run = await opened_session(desk, rollout_of(held_trajectory(0)))
    other, other_run = await opened_session(desk, rollout_of(held_trajectory(0, 1)))
    # A group that begins again forgets its forks, whose ids may then be given again.
    forgotten, leased = desk.add_trajectory(session, "e0-0.2"), rollout_of(held_trajectory(0, 2))
    forgotten_run = asyncio.create_task(desk.run(leased))
    while forgotten.rollout is not leased:
        await asyncio.sleep(0)
    newest, again = desk.add_trajectory(other, "e0-0.2"), rollout_of(held_trajectory(0, 2))
    if how == UNWANTED:
        forgotten.give_up(UNWANTED)
    else:
        desk.end(session, how)
    with pytest.raises(AgentGone):
        await forgotten_run
    newest_run = asyncio.create_task(desk.run(again))
    while newest.rollout is None and not newest_run.done():
        await asyncio.sleep(0)
    assert newest.rollout is again, "the agent of the later session waits for this lease"
    for ended in (session, other):
        desk.end(ended, "given_up")
    for task in (run, other_run, newest_run):
        with pytest.raises(AgentGone):
            await task


FULL, PAUSED = ForkStatus.POOL_FULL, ForkStatus.PAUSED


@pytest.mark.parametrize(
    ("answers", "code"),
    [
        ([(0.0, FULL), (4.9, FULL), (0.2, FULL)], "no_room"),
        ([(0.0, FULL), (2.0, PAUSED), (30.0, PAUSED), (0.1, FULL), (4.9, FULL), (0.2, FULL)], "no_room"),
        ([(0.0, PAUSED), (119.0, PAUSED), (1.1, PAUSED)], "session_parked"),
    ],
    ids=["no room for 5 s", "no room before and after a pause", "a pause of 2 min"],
)
async def test_the_time_for_room_does_not_run_during_a_pause(
    answers: list[tuple[float, ForkStatus]], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``answers`` of the queue to a request to fork: (seconds since the one before, status)."""
    now = time.monotonic()

    async def fork(*_: Any) -> Fork:
        nonlocal now
        seconds, status = answers.pop(0)
        now += seconds
        return Fork(status=status)

    monkeypatch.setattr(recorded_calls, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(recorded_calls, "_POLL_SECONDS", 0.0)
    metrics = OpenAiMetrics(Metrics("gateway"))
    desk = SessionManager(metrics, RolloutConfig())
    limits = SimpleNamespace(budget=2 * TOKENS, calls=SimpleNamespace(saving=SimpleNamespace(chunk_token_count=8)))
    calls: Any = RecordedCalls(None, desk, SimpleNamespace(fork=fork), metrics, limits)  # type: ignore[arg-type]
    session, run = await opened_session(desk, rollout_of(held_trajectory(0)))
    with pytest.raises(OpenAiError) as refused:
        await calls.open_sub_agent(session)
    assert (refused.value.code, answers) == (code, [])
    desk.end(session, "given_up")
    with pytest.raises(AgentGone):
        await run


async def test_a_call_whose_lease_another_replica_has_taken_is_sent_again_and_finds_its_session() -> None:
    async def sample(*_: Any, **__: Any) -> None:
        raise LetGo("the lease has expired")

    metrics = OpenAiMetrics(Metrics("gateway"))
    desk = SessionManager(metrics, RolloutConfig())
    limits = SimpleNamespace(budget=2 * TOKENS, calls=SimpleNamespace(saving=SimpleNamespace(chunk_token_count=8)))
    calls: Any = RecordedCalls(None, desk, None, metrics, limits)  # type: ignore[arg-type]
    rollout = replace(rollout_of(held_trajectory(0)), caller=SimpleNamespace(sample=sample))
    session, run = await opened_session(desk, rollout)
    turn = SimpleNamespace(token_count=0, stopped=False)
    with pytest.raises(OpenAiError) as told:
        await calls._sample(session.newest, turn, TOKENS, TOKENS + 8)
    assert (told.value.status, told.value.code) == (503, "session_not_known_yet")
    session.newest.busy = False
    desk.end(session, "given_up")
    with pytest.raises(AgentGone):
        await run


async def test_a_session_that_this_replica_has_lost_is_asked_of_the_one_that_has_it_now() -> None:
    async def place_of(_: str) -> AgentPlace:
        return AgentPlace(address="there:1", lives=True)

    others: Any = SimpleNamespace(address="here:1", place_of=place_of, forward=place_of)
    manager: Any = SimpleNamespace(find=lambda _: lost)
    lost = SimpleNamespace(ended="lost")
    agents = Agents(session_manager=manager, recorded=None, rewards=None, others=others)  # type: ignore[arg-type]
    nothing: dict[str, Any] = dict.fromkeys(("config", "store", "formats", "metrics", "unrecorded", "drain"))
    with pytest.raises(Elsewhere):
        await OpenAiService(agents=agents, **nothing).check_place("ses-1", here=False)


async def test_a_team_is_silent_only_when_all_its_sessions_are() -> None:
    desk = SessionManager(OpenAiMetrics(Metrics("gateway")), RolloutConfig())
    parent, run = await opened_session(desk, rollout_of(held_trajectory(0)))
    sub = desk.add_sub_agent(parent, "e0-0.3")
    assert sub.session_id == f"{parent.session_id}.3"
    assert sub.describe("run", with_task=False)["parent"] == parent.session_id
    parent.last_use -= 1000.0
    assert parent.deadline == sub.deadline == sub.last_use + 600.0
    sub.last_use -= 2000.0
    assert parent.deadline == sub.deadline == parent.last_use + 600.0
    async with sub.lock:
        assert parent.deadline > time.monotonic() + 599.0
    desk.end(parent, "given_up")
    assert sub.ended == "given_up" and not desk.sessions
    with pytest.raises(AgentGone):
        await run
