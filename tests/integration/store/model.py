"""The state graph of the queue in plain Python: what the scripts must agree with after every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Written(NamedTuple):
    """One save: ids from ``start`` on, which no other save has."""

    tokens: int
    version: int
    start: int


class Memory(NamedTuple):
    """A worker's memory of a trajectory: perhaps more than was saved, perhaps of another attempt."""

    trajectory_id: str
    incarnation: int
    content: tuple[Written, ...]


@dataclass
class ModelMember:
    state: str = "pending"
    session: str | None = None
    incarnation: int = 0
    content: tuple[Written, ...] = ()
    step: int | None = None
    attempts: int = 0
    mark: int | None = -1
    """Tokens at the last lease; -1 before the first, None when it has begun again since."""
    scorings: int = 0
    """Leases to score it, once finished."""
    reward: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(written.tokens for written in self.content)


@dataclass
class ModelGroup:
    index: int
    needed: int
    members: list[ModelMember] = field(default_factory=list)
    state: str = "open"

    @property
    def lowest_step(self) -> int | None:
        steps = [m.step for m in self.members if m.step is not None and m.state not in ("unscorable", "dead")]
        return min(steps, default=None)


@dataclass
class HalfGone:
    """A large group that has left the queue, and whose members are deleted in slices."""

    reason: str
    members: list[ModelMember]
    deleted: int = 0


LARGE = 100
"""Members up to which a group goes at once."""


@dataclass
class Model:
    """States of every group and trajectory; mirrors the rules of design, not of the scripts."""

    max_attempts: int
    filter_zero_variance: bool
    groups: dict[str, ModelGroup] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)
    """Reason of each group's removal: consumed, filtered, dead or the reason of an eviction."""
    half_gone: dict[str, HalfGone] = field(default_factory=dict)
    wasted: Counter[str] = field(default_factory=Counter)
    """Saved tokens that are never trained on, by reason."""
    pool_size: int = 0
    paused: bool = False
    trained_step: int = 0
    cut_step: int = 0
    cut_groups: list[str] = field(default_factory=list)
    cursor: int = 0
    sequence: int = 0
    version_steps: list[int] = field(default_factory=list)

    def member(self, trajectory_id: str) -> ModelMember | None:
        gid, _, number = trajectory_id.rpartition(".")
        group = self.groups.get(gid)
        return group.members[int(number)] if group and int(number) < len(group.members) else None

    def ids(self, *states: str, session: str | None = None) -> list[str]:
        """Trajectories in some state, oldest group first."""
        return [
            f"{gid}.{number}"
            for gid, group in sorted(self.groups.items(), key=lambda item: item[1].index)
            for number, m in enumerate(group.members)
            if m.state in states and (session is None or m.session == session)
        ]

    def leased(self) -> int:
        return self.count("leased")

    def count(self, state: str) -> int:
        """Count the members in a state, those of half-deleted groups included."""
        left = [m for g in self.half_gone.values() for m in g.members[g.deleted :]]
        return len(self.ids(state)) + sum(m.state == state for m in left)

    def admit(self, gid: str, needed: int) -> None:
        self.sequence += 1
        self.groups[gid] = ModelGroup(self.sequence, needed, [ModelMember() for _ in range(needed)])

    def lease(self, session: str, limit: int) -> list[str]:
        taken: list[str] = []
        room = 0 if self.paused else min(limit, self.pool_size - self.leased())
        while len(taken) < room:
            waiting = self.ids("partial") or self.ids("pending")
            if not waiting:
                break
            m = self.member(waiting[0])
            assert m is not None
            m.attempts = m.attempts + 1 if m.mark in (m.tokens, None) else 1
            if m.attempts > self.max_attempts:
                self.lose_member(waiting[0], "dead")
                continue
            m.state, m.session, m.mark = "leased", session, m.tokens
            taken.append(waiting[0])
        return taken

    def save(self, trajectory_id: str, written: Written) -> None:
        m = self.member(trajectory_id)
        assert m is not None
        self.begin(trajectory_id, written.version)
        m.content += (written,)

    def restart(self, trajectory_id: str) -> int:
        m = self.member(trajectory_id)
        assert m is not None
        if m.content:
            m.content, m.step, m.mark = (), None, None
            m.incarnation += 1
        return m.incarnation

    def held_by(self, session: str) -> list[Memory]:
        """Return the memory of a worker that has missed nothing."""
        members = ((i, self.member(i)) for i in self.ids("leased", "finished", session=session))
        return [Memory(i, m.incarnation, m.content) for i, m in members if m is not None]

    def reregister(self, session: str, stated: Sequence[Memory]) -> list[tuple[bool, int]]:
        """(kept, saved tokens) per trajectory: its tokens in the queue have to be the first ones of those stated."""
        agreeing = {s.trajectory_id for s in stated if self._begins(s)}
        for trajectory_id in self.ids("leased", "finished", session=session):
            if trajectory_id not in agreeing:
                self.give_back(trajectory_id, free_attempt=True)
        free, answers = self.pool_size - self.leased(), []
        for each in stated:
            m = self.member(each.trajectory_id) if each.trajectory_id in agreeing else None
            kept = m is not None and m.state in ("leased", "finished") and m.session in (session, None)
            if m is not None and m.state in ("partial", "pending") and free > 0:
                kept, free = True, free - 1
                m.state, m.mark, m.attempts = "leased", m.tokens, max(1, m.attempts)
            if m is not None and kept:
                m.session = session
            answers.append((kept, m.tokens if m is not None and kept else 0))
        return answers

    def _begins(self, stated: Memory) -> bool:
        m = self.member(stated.trajectory_id)
        if m is None or m.incarnation != stated.incarnation:
            return False
        return stated.content[: len(m.content)] == m.content

    def begin(self, trajectory_id: str, version: int) -> None:
        m = self.member(trajectory_id)
        assert m is not None
        step = self.version_steps[version]
        m.step = step if m.step is None else min(m.step, step)

    def give_back(self, trajectory_id: str, *, free_attempt: bool) -> None:
        m = self.member(trajectory_id)
        assert m is not None
        m.session = None
        if m.state == "leased":
            m.state = "partial" if m.tokens else "pending"
            m.step = m.step if m.tokens else None
            if free_attempt:
                m.attempts = max(0, m.attempts - 1)
        elif free_attempt:
            m.scorings = max(0, m.scorings - 1)

    def lease_scoring(self, session: str, limit: int) -> list[str]:
        taken: list[str] = []
        for trajectory_id in [i for i in self.ids("finished") if self.member(i).session is None][:limit]:  # type: ignore[union-attr]
            m = self.member(trajectory_id)
            assert m is not None
            m.scorings += 1
            if m.scorings > self.max_attempts:
                self.lose_member(trajectory_id, "dead")
                continue
            m.session = session
            taken.append(trajectory_id)
        return taken

    def score(self, trajectory_id: str, reward: float | None) -> None:
        m = self.member(trajectory_id)
        assert m is not None
        if reward is None:
            self.lose_member(trajectory_id, "unscorable")
        else:
            m.state, m.reward = "scored", reward
            self.settle(trajectory_id.rpartition(".")[0])

    def lose_member(self, trajectory_id: str, state: str) -> None:
        gid = trajectory_id.rpartition(".")[0]
        group, m = self.groups[gid], self.member(trajectory_id)
        assert m is not None
        m.state, m.step = state, None if state == "dead" else m.step
        self.wasted[state] += m.tokens
        if len(group.members) < 2 * group.needed:
            group.members.append(ModelMember())
        self.settle(gid)

    def settle(self, gid: str) -> None:
        group = self.groups[gid]
        if any(m.state not in ("scored", "unscorable", "dead") for m in group.members):
            return
        rewards = [m.reward for m in group.members if m.state == "scored"]
        if len(rewards) < 2:
            self.drop(gid, "too_few_scored")
        elif self.filter_zero_variance and min(rewards) == max(rewards):
            self.drop(gid, "filtered_all_right" if rewards[0] > 0 else "filtered_all_wrong")
        else:
            group.state = "ready"

    def drop(self, gid: str, reason: str) -> None:
        members = self.groups.pop(gid).members
        self.gone[gid] = reason
        if reason == "consumed":
            return
        self.half_gone[gid] = HalfGone(reason, members)
        if len(members) <= LARGE:
            self.sweep(gid, len(members))

    def sweep(self, gid: str, most: int) -> None:
        group = self.half_gone[gid]
        group.deleted += most
        if group.deleted >= len(group.members):
            del self.half_gone[gid]
            lost = (m for m in group.members if m.state not in ("unscorable", "dead"))
            self.wasted[group.reason] += sum(m.tokens for m in lost)

    def ready(self) -> list[str]:
        ready = [gid for gid, g in self.groups.items() if g.state == "ready"]
        return sorted(ready, key=lambda gid: self.groups[gid].index)

    def cut(self, gids: list[str]) -> None:
        self.cut_step += 1
        self.cut_groups = gids
        for gid in gids:
            self.groups[gid].state = "cut"

    def trained(self) -> None:
        self.trained_step = self.cut_step
        for gid in self.cut_groups:
            self.drop(gid, "consumed")
        self.cut_groups = []
