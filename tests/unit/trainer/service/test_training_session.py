"""State that a trainer reads at startup, and its stop on request."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.errors import CheckpointError, Conflict, Reason, SessionLost, StoreUnavailable
from rollmesh.mesh import Cursor
from rollmesh.runtime.health import Health
from rollmesh.runtime.metrics import Metrics
from rollmesh.store.queue_types import TrainingState
from rollmesh.trainer.service.policy_catalog import PolicyCatalog
from rollmesh.trainer.service.trainer_metrics import TrainerMetrics
from rollmesh.trainer.service.training_session import LOOP_NAME, TrainingSession
from rollmesh.types import PolicyRecord


async def test_a_trainer_that_waits_for_a_batch_stops_at_once() -> None:
    waits, shutdown = asyncio.Event(), asyncio.Event()

    async def claim(*_: Any) -> None:
        waits.set()
        await asyncio.sleep(3600)

    store: Any = SimpleNamespace(training=SimpleNamespace(claim=claim))
    nothing: Any = None
    session = TrainingSession(store, nothing, nothing, nothing, shutdown)
    waiting = asyncio.create_task(session.claim(1, 60.0))
    await waits.wait()
    assert not waiting.done()
    shutdown.set()
    async with asyncio.timeout(60):
        assert await waiting is None


@dataclass
class Checkpoints:
    """Has the batch files of steps 1 to 6, and writes down which are read."""

    root: Path = Path("checkpoints")
    read: list[int] = field(default_factory=list)
    unreadable: dict[int, Reason] = field(default_factory=dict)

    def batch_steps(self) -> list[int]:
        return list(range(1, 7))

    def batch_footer(self, train_step: int) -> Any:
        self.read.append(train_step)
        if train_step in self.unreadable:
            raise CheckpointError(f"batch file {train_step}: no", reason=self.unreadable[train_step])
        return SimpleNamespace(
            group_ids=[f"e0-{train_step}"],
            payload_sha256=str(train_step),
            cursor=Cursor(epoch=0, index=train_step),
            outcomes=[],
        )

    def complete_policies(self, *, announced_only: bool) -> list[PolicyRecord]:
        return []


@dataclass
class Store:
    """Knows these many steps as trained, and these many policies."""

    trained_step: int
    policy_count: int = 0
    run_id: str = ""
    told: list[dict[str, Any]] = field(default_factory=list)
    refusals: list[Exception] = field(default_factory=list)
    """Errors of the next re-assertions, during which the server comes back again."""
    asked: list[int] = field(default_factory=list)

    @property
    def training(self) -> "Store":
        return self

    @property
    def policies(self) -> "Store":
        return self

    async def state(self) -> TrainingState:
        return TrainingState(trained_step=self.trained_step, cut_step=6, committed_step=5, recovering=False)

    @property
    def recovery(self) -> "Store":
        return self

    async def server_run_id(self) -> str:
        return self.run_id

    async def open_session(self, name: str, token: str, lineage: str) -> None:
        pass

    async def reassert(self, token: str, **words: Any) -> None:
        if self.refusals:
            self.run_id += "again"
            raise self.refusals.pop()
        self.told.append(words)
        self.policy_count = max(self.policy_count, len(words["policies"]))

    async def latest(self) -> PolicyRecord | None:
        return (await self.announced(self.policy_count - 2))[-1] if self.policy_count else None

    async def announced(self, after: int) -> list[PolicyRecord]:
        self.asked.append(after)
        return [
            PolicyRecord(policy_version=v, train_step=v, path=str(v), manifest_digest="")
            for v in range(after + 1, self.policy_count)
        ]


def session_with(store: Store, checkpoints: Checkpoints) -> TrainingSession:
    parts: tuple[Any, ...] = (store, checkpoints, PolicyCatalog(cast(CheckpointStore, checkpoints)))
    return TrainingSession(*parts, TrainerMetrics(Metrics("trainer")), asyncio.Event())


@pytest.mark.parametrize(("known", "read"), [(5, [6]), (3, [4, 5, 6]), (0, [1, 2, 3, 4, 5, 6]), (6, [6])])
async def test_a_start_reads_the_batch_files_that_redis_does_not_know_as_trained_and_the_newest(
    known: int, read: list[int]
) -> None:
    store, checkpoints = Store(trained_step=known), Checkpoints()
    await session_with(store, checkpoints).begin(committed_step=5)
    assert checkpoints.read == read
    (told,) = store.told
    assert [step for step, _ in told["batches"]] == read
    assert (told["known_step"], told["trained_step"], told["cursor"].index) == (known, 5, 6)


async def test_nothing_is_sent_while_a_batch_file_is_unreachable_but_a_damaged_one_is_left_out() -> None:
    store, checkpoints = Store(trained_step=3), Checkpoints(unreadable={5: Reason.UNREACHABLE})
    with pytest.raises(CheckpointError, match="batch file 5: no"):
        await session_with(store, checkpoints).begin(committed_step=5)
    assert store.told == []
    checkpoints.unreadable[5] = Reason.TORN
    await session_with(store, checkpoints).begin(committed_step=5)
    assert [step for step, _ in store.told[0]["batches"]] == [4, 6]


async def test_after_a_restart_of_redis_an_unreachable_batch_file_is_waited_for() -> None:
    store, checkpoints = Store(trained_step=3), Checkpoints()
    session = session_with(store, checkpoints)
    await session.begin(committed_step=5)
    session.token, store.run_id = "trainer", "restarted"
    checkpoints.unreadable[5] = Reason.UNREACHABLE
    checkpoints.read.clear()
    watching = asyncio.create_task(session.watch(0.001))
    async with asyncio.timeout(60):
        while checkpoints.read.count(5) < 2 and not watching.done():
            await asyncio.sleep(0.001)
        assert not watching.done() and len(store.told) == 1
        del checkpoints.unreadable[5]
        while len(store.told) < 2:
            await asyncio.sleep(0.001)
    watching.cancel()
    assert [step for step, _ in store.told[1]["batches"]] == [4, 5, 6]


@pytest.mark.parametrize("refusal", [StoreUnavailable("came back again"), SessionLost("unknown session")])
async def test_a_refused_call_is_made_again_after_a_redis_that_dies_twice_has_all_batch_files(
    refusal: Exception,
) -> None:
    """The refusal itself, a Conflict of the restored state, ends no trainer."""
    store = Store(trained_step=3)
    session = session_with(store, Checkpoints())
    await session.begin(committed_step=5)
    session.token, store.run_id, store.refusals = "trainer", "restarted", [refusal]

    async def report() -> None:
        if len(store.told) < 2:
            raise Conflict("train step 5 was not cut")

    await session.retry("report", report)
    assert [len(told["batches"]) for told in store.told] == [3, 3]


async def test_a_session_that_a_newer_trainer_has_fenced_ends_after_a_restart_of_redis_too() -> None:
    store = Store(trained_step=3)
    session = session_with(store, Checkpoints())
    await session.begin(committed_step=5)

    async def fenced(*_: Any, **words: Any) -> None:
        raise SessionLost("a newer trainer")

    session.token, store.run_id = "trainer", "restarted"
    store.open_session = fenced  # type: ignore[method-assign]
    with pytest.raises(SessionLost, match="a newer trainer"):
        await session.watch(0.0)


async def test_a_trainer_that_waits_for_redis_is_alive_after_hours() -> None:
    now, stalled = 0.0, []
    health = Health(clock=lambda: now)
    health.watch(LOOP_NAME, 3600.0)
    parts: Any = (Store(trained_step=0), Checkpoints(), None, TrainerMetrics(Metrics("trainer")), asyncio.Event())
    session = TrainingSession(*parts, health)

    async def ask() -> None:
        nonlocal now
        stalled.append(health.stalled())
        now += 3000.0
        if now < 8000.0:
            raise StoreUnavailable("no answer")

    await session.retry("ask", ask)
    assert len(stalled) == 3 and not any(stalled)


async def test_policies_are_read_once() -> None:
    store = Store(trained_step=6, policy_count=4)
    session = session_with(store, Checkpoints())
    await session.begin(committed_step=6)
    store.policy_count = 6
    await session.learn_policies()
    await session.learn_policies()
    assert store.asked == [-1, 3, 5]


async def test_a_policy_that_redis_has_forgotten_is_sent_again_before_the_newest_one_is_read() -> None:
    store = Store(trained_step=6, policy_count=4)
    session = session_with(store, Checkpoints())
    session.token = "trainer"
    await session.begin(committed_step=6)
    store.policy_count, store.run_id = 1, "restarted"
    newest = await session.newest_policy()
    assert newest is not None and newest.policy_version == 3
    assert [record.policy_version for record in store.told[-1]["policies"]] == [0, 1, 2, 3]
