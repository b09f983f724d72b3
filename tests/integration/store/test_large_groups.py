"""Groups of more than 200 members leave the queue in one step and are deleted in slices, between which actors die."""

import random
from collections.abc import Sequence

import pytest

from rollmesh.mesh import Cursor
from rollmesh.sim.queue_model import GroupState, ModelMember, Save
from rollmesh.store import EmbeddedServer, Finish, FirstToken, ReleaseReason, Score, TrajectoryStore, WriteStatus
from rollmesh.store.scripts import MAX_KEYS_PER_SCRIPT
from rollmesh.types import FinishReason

from .queue_machine import QueueMachine
from .queue_walk import DRAWS, walk
from .queue_workers import byte_count, stated
from .store_mesh import Mesh, scored
from .stored_keys import read_truth
from .test_script_keys import most_keys

SIZE = 201
WALK = {
    1: "roll_back fail restart lose_worker stall wake redis_restarts",
    2: "open_worker score release report_first_token",
    3: "whole_step append finish complete_group",
    4: "admit",
    6: "sweep_a_slice reset_a_slice",
    9: "evict recall",
    10: "lease",
    12: "begin_again_in_part",
    16: "work_on_what_is_half_gone",
}


def finish_of(m: ModelMember, save: Save) -> Finish:
    return Finish(trajectory_id=m.trajectory_id, finish_reason=FinishReason.STOP, **stated(m, save))


class LargeGroups(QueueMachine):
    """The walk of the state graph with large groups; the leader dies after every slice."""

    group_size = SIZE
    max_staleness = 0
    slices = late_writes = resets = 0

    def admit(self, count: int, needed: int, spare: int) -> None:
        if len(self.group_ids()) < 3:
            super().admit(count, needed, spare)

    def sweep_a_slice(self, pick: int) -> None:
        gone = self.do(self.store.connection.command("HKEYS", self.store.connection.keys.single("dropped")))
        if gone:
            gid = sorted(gone)[pick % len(gone)].decode()
            more = self.do(self.store.connection.run("sweep_dropped", gid, 64))
            assert bool(more) == self.model.sweep(gid, 64)
            self.slices += 1

    def begin_again_in_part(self, aside: bool) -> None:
        """The leader dies right after its call: other actors find the group open or aside, but without a record."""
        script = "set_aside" if aside else "restart_groups"
        for gid in self.group_ids():
            begun = self.model.begin_again([gid], aside=aside)
            reply = self.do(self.store.connection.run(script, self.leader, gid))
            assert reply == [len(begun), [gid.encode() for gid in begun]]
            self.begun_again[aside] += len(begun)

    def reset_a_slice(self, pick: int) -> None:
        gids = sorted(self.model.returning)
        if gids:
            gid = gids[pick % len(gids)]
            more = self.model.sweep_returning(gid, 64)
            assert bool(self.do(self.store.connection.run("sweep_returning", gid, 64))) == more
            self.resets += 1

    def work_on_what_is_half_gone(self, pick: int) -> None:
        """A worker that has not heard that a group is gone, or begins again, does with a member whatever it likes."""
        left = [m for group in self.model.half_gone.values() for m in group.members[group.deleted :]]
        left += [m for reset in self.model.returning.values() for m in reset.group.members[: reset.left]]
        held = [m for m in left if m.state == "leased" and m.session in self.sessions]
        if not held:
            return
        m = held[pick % len(held)]
        session, trajectory_id = m.session or "", m.trajectory_id
        status, _ = self.model.fork(session, trajectory_id)
        assert self.do(self.store.trajectories.fork(session, trajectory_id, "nonce")).status is status
        assert not self.do(self.store.trajectories.fail(session, [(trajectory_id, "broke")]))
        assert not self.model.fail(session, trajectory_id)
        if not m.tokens:
            first = FirstToken(trajectory_id=trajectory_id, policy_version=0)
            assert self.do(self.store.trajectories.report_first_tokens(session, [first]))[0].status is WriteStatus.SAVED
            assert self.model.begin(session, trajectory_id, 0) is WriteStatus.SAVED
        if pick % 4 == 0:
            save = self.write(2, self.model.policy_version)
            item = finish_of(m, save)
            status = self.model.finish(session, trajectory_id, save, byte_count(save))
            assert self.do(self.store.trajectories.finish(session, [item]))[0].status is status is WriteStatus.SAVED
            score = Score(trajectory_id=trajectory_id, outcome=scored(1.0), shaped_reward=1.0)
            status = self.model.score(session, trajectory_id, 1.0)
            assert self.do(self.store.trajectories.score(session, [score]))[0].status is status is WriteStatus.LOST
        elif pick % 4 == 1:
            assert self.do(self.store.trajectories.release(session, [trajectory_id], ReleaseReason.FAILED)) == 1
            assert self.model.release(session, trajectory_id, free_attempt=False)
        elif pick % 4 == 2:
            incarnation = self.model.restart(session, trajectory_id)
            assert self.do(self.store.trajectories.restart(session, [trajectory_id])) == [incarnation]
        self.late_writes += 1

    def complete_group(self) -> None:
        """Lease, finish and score every member of the oldest open group."""
        gid = next((i for i in self.model.groups[GroupState.OPEN] if i not in self.model.returning), None)
        if gid is None:
            return
        self.set_pool(4 * SIZE, False)
        self.open_worker()
        while self.of_group(gid, "pending", "partial"):
            self.lease(0, 64)
        by_session: dict[str, list[ModelMember]] = {}
        for m in self.of_group(gid, "leased"):
            by_session.setdefault(m.session or "", []).append(m)
        for session, members in by_session.items():
            saves = [self.write(1, self.model.policy_version) for _ in members]
            items = [finish_of(m, save) for m, save in zip(members, saves, strict=True)]
            assert {r.status for r in self.do(self.store.trajectories.finish(session, items))} == {WriteStatus.SAVED}
            for m, save in zip(members, saves, strict=True):
                self.model.finish(session, m.trajectory_id, save, byte_count(save))
        while any(m.session is None for m in self.of_group(gid, "finished")):
            self.take_over_scoring(0, 64)
        self.score_all(self.of_group(gid, "finished"))

    def score_all(self, members: Sequence[ModelMember]) -> None:
        for at, m in enumerate(members):
            if m.state == "surplus":
                continue
            session, reward = m.session or "", float(at % 2)
            item = Score(trajectory_id=m.trajectory_id, outcome=scored(reward), shaped_reward=reward)
            status = self.model.score(session, m.trajectory_id, reward)
            assert self.do(self.store.trajectories.score(session, [item]))[0].status is status is WriteStatus.SAVED

    def of_group(self, gid: str, *states: str) -> list[ModelMember]:
        group = self.model.find_group(gid)
        return [m for m in group.members if m.state in states] if group else []


def test_a_large_group_that_is_half_gone_is_finished_by_any_actor(server: EmbeddedServer) -> None:
    LargeGroups.url = server.url
    machine = LargeGroups()
    draws = DRAWS | {
        "count": lambda _: 1,
        "needed": lambda _: SIZE,
        "spare": lambda _: 9 * (machine.model.admitted % 2),
        "limit": lambda rng: rng.randint(1, 64),
        "age": lambda rng: rng.randint(0, 1),
        "reward": lambda rng: rng.choice([0.0, 1.0, None]),
        "aside": lambda rng: rng.random() < 0.7,
    }
    machine.begin(filtering=True, pool=2 * SIZE, most_members=0)
    try:
        walk(machine, random.Random(2), 600, WALK, draws)
        reasons = set(machine.model.ended.values())
        assert {"consumed", "straggler", "rolled_back"} <= reasons, reasons
        assert min(machine.slices, machine.late_writes) >= 10, (machine.slices, machine.late_writes)
        # test_restarted_groups.py has both ways to begin again and the recall of a large group.
        assert machine.begun_again.total() >= 1 and machine.resets >= 2, (machine.begun_again, machine.resets)
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


@pytest.mark.parametrize("reason", ["straggler", "rolled_back", "in a batch file"])
async def test_a_large_group_that_goes_keeps_to_the_bound(
    server: EmbeddedServer, store: TrajectoryStore, reason: str
) -> None:
    """In the last case Redis came back from before the group was complete; its members are leased there."""
    mesh = await half_leased(store)
    file = [(1, ["e0-0"])]
    acts = {
        "straggler": lambda: store.leadership.evict(mesh.leader, ["e0-0"], "straggler"),
        "rolled_back": lambda: store.training.roll_back(mesh.trainer),
        "in a batch file": lambda: store.training.reassert(mesh.trainer, 0, 0, file, [], Cursor(index=1)),
    }
    assert 0 < await most_keys(server, store, acts[reason]) <= MAX_KEYS_PER_SCRIPT
    await swept(server, store, mesh)
    drops = [(drop.group_id, drop.reason, drop.token_count) for drop in await store.ledger.drops()]
    is_cut = reason == "in a batch file"
    assert drops == ([] if is_cut else [("e0-0", reason, 9)])
    assert await store.mesh.live_groups() == (["e0-0"] if is_cut else [])


async def test_sweeping_a_batch_of_large_groups_keeps_to_the_bound(
    server: EmbeddedServer, store: TrajectoryStore
) -> None:
    mesh = await Mesh.start(store, pool_size=10_000, group_size=300)
    await mesh.admit(1, needed=300)
    await mesh.complete_all()
    await store.leadership.cut(mesh.leader, 1, ["e0-0"])
    await mesh.claim(1)
    used = await most_keys(server, store, lambda: store.training.confirm_batch_file(mesh.trainer, 1, "digest"))
    assert 0 < used <= MAX_KEYS_PER_SCRIPT
    await swept(server, store, mesh)
    assert await store.ledger.drops() == []
