"""Groups of more than 200 members leave the queue in one step and are deleted in slices, between which actors die."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from rollmesh.mesh import Cursor
from rollmesh.store import EmbeddedServer, Finish, FirstToken, ReleaseReason, Score, TrajectoryStore, WriteStatus
from rollmesh.store.scripts import MAX_KEYS_PER_SCRIPT
from rollmesh.types import FinishReason

from .model import Memory, ModelMember, Written
from .queue_machine import QueueMachine
from .queue_workers import stated
from .store_mesh import Mesh, scored
from .stored_keys import read_truth
from .test_script_keys import most_keys

SIZE = 201
WALK = {
    "admit": 4,
    "evict": 3,
    "whole_step": 3,
    "roll_back": 1,
    "open_worker": 2,
    "lease": 10,
    "append": 3,
    "finish": 3,
    "score": 2,
    "release": 2,
    "fail": 1,
    "restart": 1,
    "report_first_token": 2,
    "lose_worker": 1,
    "stall": 1,
    "wake": 1,
    "redis_restarts": 1,
    "complete_group": 3,
    "sweep_a_slice": 4,
    "work_on_what_is_half_gone": 16,
}


def finish_of(trajectory_id: str, m: ModelMember, written: Written) -> Finish:
    return Finish(trajectory_id=trajectory_id, finish_reason=FinishReason.STOP, **stated(m, written))


class LargeGroups(QueueMachine):
    """The walk of the state graph with large groups; the leader dies after every slice."""

    group_size = SIZE
    slices = late_writes = 0

    def sweep_a_slice(self, pick: int) -> None:
        gone = self.do(self.store.connection.command("HKEYS", self.store.connection.keys.single("dropped")))
        if gone:
            gid = sorted(gone)[pick % len(gone)].decode()
            more = self.do(self.store.connection.run("sweep_dropped", gid, 64))
            if gid in self.model.half_gone:
                self.model.sweep(gid, 64)
                assert more == (gid in self.model.half_gone)
            self.slices += 1

    def work_on_what_is_half_gone(self, pick: int) -> None:
        """A worker that has not heard that a group is gone does with a member of it whatever it likes."""
        held = [
            (f"{gid}.{number}", m)
            for gid, group in self.model.half_gone.items()
            for number, m in enumerate(group.members)
            if number >= group.deleted and m.state == "leased" and m.session in self.sessions
        ]
        if not held:
            return
        trajectory_id, m = held[pick % len(held)]
        session = m.session
        assert session is not None
        assert self.do(self.store.trajectories.fork(session, trajectory_id, "nonce")).leased is None
        assert self.do(self.store.trajectories.fail(session, [(trajectory_id, "broke")])) == 0
        if not m.tokens:
            self.do(
                self.store.trajectories.report_first_tokens(
                    session, [FirstToken(trajectory_id=trajectory_id, policy_version=0)]
                )
            )
        if pick % 4 == 0:
            written = self.write(2, len(self.model.version_steps) - 1)
            item = finish_of(trajectory_id, m, written)
            assert self.do(self.store.trajectories.finish(session, [item]))[0].status is WriteStatus.SAVED
            m.content, m.state = (*m.content, written), "finished"
            score = Score(trajectory_id=trajectory_id, outcome=scored(1.0), shaped_reward=1.0)
            assert self.do(self.store.trajectories.score(session, [score]))[0].status is WriteStatus.LOST
        elif pick % 4 == 1:
            assert self.do(self.store.trajectories.release(session, [trajectory_id], ReleaseReason.FAILED)) == 1
            m.session = None
        elif pick % 4 == 2:
            self.do(self.store.trajectories.restart(session, [trajectory_id]))
            m.content, m.incarnation = (), m.incarnation + bool(m.content)
        self.late_writes += 1

    def complete_group(self) -> None:
        """Lease, finish and score every member of the oldest open group."""
        gid = next((gid for gid, g in self.model.groups.items() if g.state == "open"), None)
        if gid is None:
            return
        self.set_pool(4 * SIZE, False)
        self.open_worker()
        while self.of_group(gid, "pending", "partial"):
            self.lease(0, 64)
        by_session: dict[str | None, list[str]] = {}
        for trajectory_id in self.of_group(gid, "leased"):
            by_session.setdefault(self.member(trajectory_id).session, []).append(trajectory_id)
        for session, ids in by_session.items():
            assert session is not None
            written = {i: self.write(1, len(self.model.version_steps) - 1) for i in ids}
            items = [finish_of(i, self.member(i), written[i]) for i in ids]
            assert {r.status for r in self.do(self.store.trajectories.finish(session, items))} == {WriteStatus.SAVED}
            for i in ids:
                self.model.save(i, written[i])
                self.member(i).state = "finished"
        while self.of_group(gid, "finished", held=False):
            self.take_over_scoring(0, 64)
        self.score_all(self.of_group(gid, "finished"))

    def score_all(self, ids: Sequence[str]) -> None:
        for at, trajectory_id in enumerate(ids):
            session = self.member(trajectory_id).session
            assert session is not None
            reward = float(at % 2)
            item = Score(trajectory_id=trajectory_id, outcome=scored(reward), shaped_reward=reward)
            assert self.do(self.store.trajectories.score(session, [item]))[0].status is WriteStatus.SAVED
            self.model.score(trajectory_id, reward)

    def register(self, session: str, memories: list[Memory]) -> None:
        """Trajectories that a worker does not name are released, those of half-deleted groups too."""
        super().register(session, memories)
        for group in self.model.half_gone.values():
            for m in group.members:
                m.session = None if m.session == session else m.session

    def member(self, trajectory_id: str) -> ModelMember:
        m = self.model.member(trajectory_id)
        assert m is not None
        return m

    def of_group(self, gid: str, *states: str, held: bool = True) -> list[str]:
        ids = [i for i in self.model.ids(*states) if i.startswith(f"{gid}.")]
        return ids if held else [i for i in ids if self.member(i).session is None]


def test_a_large_group_that_is_half_gone_is_finished_by_any_actor(server: EmbeddedServer) -> None:
    LargeGroups.url = server.url
    machine, rng = LargeGroups(), random.Random(5)
    arguments: dict[str, Callable[[], dict[str, Any]]] = {
        "admit": lambda: {"count": 1, "needed": SIZE},
        "evict": lambda: {"pick": 3 * rng.randrange(300)},
        "whole_step": lambda: {"count": 1},
        "lease": lambda: {"pick": rng.randrange(1000), "limit": rng.randint(1, 64)},
        "append": lambda: {"pick": rng.randrange(1000), "tokens": rng.randint(1, 5), "age": rng.randint(0, 1)},
        "finish": lambda: {"pick": rng.randrange(1000), "tokens": rng.randint(1, 3)},
        "score": lambda: {"pick": rng.randrange(1000), "reward": rng.choice([0.0, 1.0, None])},
        "release": lambda: {"pick": rng.randrange(1000), "reason": rng.choice(list(ReleaseReason))},
        "report_first_token": lambda: {"pick": rng.randrange(1000), "age": 0},
        "lose_worker": lambda: {"pick": rng.randrange(1000), "dies": rng.random() < 0.6},
    }
    for name in ("fail", "restart", "redis_restarts", "stall", "wake", "sweep_a_slice", "work_on_what_is_half_gone"):
        arguments[name] = lambda: {"pick": rng.randrange(1000)}
    enabled = {
        "admit": lambda: len(machine.model.groups) < 2,
        "whole_step": lambda: machine.model.ready() and not machine.model.cut_groups,
    }
    machine.begin(filtering=True, pool=2 * SIZE)
    try:
        for _ in range(250):
            name = rng.choices(list(WALK), weights=list(WALK.values()))[0]
            if enabled.get(name, lambda: True)():
                getattr(machine, name)(**arguments.get(name, dict)())
                machine.the_queue_agrees_with_the_model()
                machine.the_view_agrees_with_the_model()
        reasons = set(machine.model.gone.values())
        assert {"consumed", "straggler", "rolled_back"} <= reasons, reasons
        assert min(machine.slices, machine.late_writes) >= 10, (machine.slices, machine.late_writes)
    finally:
        machine.teardown()


async def half_leased(store: TrajectoryStore) -> Mesh:
    """A group of which some members are leased, one with tokens, some partial, and most pending."""
    mesh = await Mesh.start(store, pool_size=10_000, group_size=300)
    await mesh.admit(1, needed=300)
    for _ in range(4):
        await store.trajectories.lease(mesh.session, 64)
    await mesh.append("e0-0.7", 0, 5)
    await mesh.append("e0-0.8", 0, 4)
    await store.trajectories.release(mesh.session, ["e0-0.8"], ReleaseReason.DRAINED)
    return mesh


async def swept(server: EmbeddedServer, store: TrajectoryStore, mesh: Mesh) -> None:
    """Finish the removal as the successor of a dead leader."""
    assert "e0-0" in await store.mesh.live_groups()
    assert await store.trajectories.lease(await store.sessions.open("another"), 64) == [], (
        "nothing of a half-gone group is leased"
    )
    assert (await read_truth(store)).problems == []
    assert 0 < await most_keys(server, store, lambda: store.leadership.reap(mesh.leader)) <= MAX_KEYS_PER_SCRIPT
    truth = await read_truth(store)
    assert (truth.problems, truth.half_gone) == ([], {})
    assert (await store.mesh.counts()).trajectories["leased"] == 0


async def test_evicting_a_large_group_keeps_to_the_bound(server: EmbeddedServer, store: TrajectoryStore) -> None:
    mesh = await half_leased(store)
    used = await most_keys(server, store, lambda: store.leadership.evict(mesh.leader, ["e0-0"], "straggler"))
    assert 0 < used <= MAX_KEYS_PER_SCRIPT
    await swept(server, store, mesh)
    (drop,) = await store.ledger.drops()
    assert (drop.group_id, drop.reason, drop.token_count) == ("e0-0", "straggler", 9)
    assert await store.mesh.live_groups() == []


async def test_rolling_back_a_large_group_keeps_to_the_bound(server: EmbeddedServer, store: TrajectoryStore) -> None:
    mesh = await half_leased(store)
    assert 0 < await most_keys(server, store, lambda: store.training.roll_back(mesh.trainer)) <= MAX_KEYS_PER_SCRIPT
    await swept(server, store, mesh)
    assert (await store.mesh.counts()).dropped_tokens == {"rolled_back": 9}


async def test_sweeping_a_batch_of_large_groups_keeps_to_the_bound(
    server: EmbeddedServer, store: TrajectoryStore
) -> None:
    mesh = await Mesh.start(store, pool_size=10_000, group_size=300)
    await mesh.admit(1, needed=300)
    await mesh.complete_all()
    await store.leadership.cut(mesh.leader, 1, ["e0-0"])
    batch = await store.training.claim(mesh.trainer, 1, 1.0)
    assert batch is not None
    used = await most_keys(server, store, lambda: store.training.confirm_batch_file(mesh.trainer, 1, "digest"))
    assert 0 < used <= MAX_KEYS_PER_SCRIPT
    await swept(server, store, mesh)
    assert await store.ledger.drops() == []


async def test_forgetting_a_large_group_that_a_batch_file_has_keeps_to_the_bound(
    server: EmbeddedServer, store: TrajectoryStore
) -> None:
    """Redis came back from before the group was complete; its members are leased there."""
    mesh = await half_leased(store)

    async def reassert() -> None:
        await store.training.reassert(mesh.trainer, 0, 0, [(1, ["e0-0"])], [], Cursor(index=1))

    assert 0 < await most_keys(server, store, reassert) <= MAX_KEYS_PER_SCRIPT
    await swept(server, store, mesh)
    assert await store.mesh.live_groups() == ["e0-0"], "it is cut, and not trained yet"


async def test_a_large_group_that_an_older_release_dropped_is_swept(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, pool_size=10_000, group_size=300)
    await mesh.admit(1, needed=300)
    command, keys = store.connection.command, store.connection.keys
    await command("DEL", keys.single("pending"), keys.single("open"))
    await command("HSET", keys.single("dropped"), "e0-0", "0 0 0 0 too_few_scored")
    await store.leadership.reap(mesh.leader)
    assert [drop.reason for drop in await store.ledger.drops()] == ["too_few_scored"]
    assert await command("EXISTS", keys.of("group", "e0-0"), keys.of("prompt", "e0-0"), keys.single("dropped")) == 0
