"""The queue read key by key, without its scripts: what is really there, and whether it contradicts itself."""

import json
from collections import Counter
from dataclasses import dataclass, field

from rollmesh.store import TokenDigest, TrajectoryStore
from rollmesh.store.payload import NO_TOKENS, decode_segments
from rollmesh.store.trajectories import load_chunks

HELD = ("leased", "finished")
COUNTED = ("leased", "finished", "scored", "unscorable", "dead", "surplus")
QUEUES = ("pending", "partial", "resting", "scoring")
SORTED_STATES = ("open", "ready", "aside")
DISCARDED = ("dead", "surplus")
"""States without tokens in the queue."""
NOT_IN_LOSS = ("unscorable", *DISCARDED)


@dataclass
class Record:
    state: str
    session: str | None
    tokens: int
    step: int | None
    digest: TokenDigest = NO_TOKENS
    """Of the segments that are there."""


@dataclass
class Truth:
    groups: dict[str, str] = field(default_factory=dict)
    """State by group that is open, ready, aside or cut."""
    members: dict[str, Record] = field(default_factory=dict)
    tombstones: set[str] = field(default_factory=set)
    half_gone: dict[str, Record] = field(default_factory=dict)
    """Members, not deleted or reset yet, of large groups that are gone or begin again."""
    undecided: set[str] = field(default_factory=set)
    """Open groups that wait for a decision of the leader."""
    problems: list[str] = field(default_factory=list)

    def count(self, state: str) -> int:
        return sum(r.state == state for r in (*self.members.values(), *self.half_gone.values()))


class _Reader:
    def __init__(self, store: TrajectoryStore) -> None:
        self.connection = store.connection
        self.keys = store.connection.keys
        self.truth = Truth()

    async def names(self) -> dict[str, list[str]]:
        """Return the ids in every queue and state; one exchange, because the state machine reads them at every step."""
        sets = (*QUEUES, *SORTED_STATES, "tombstones", "undecided")
        ranges = [("ZRANGE", self.keys.single(name), 0, -1) for name in sets]
        raw = await self.connection.commands([*ranges, ("HKEYS", self.keys.single("cut"))])
        return {name: [item.decode() for item in items] for name, items in zip((*sets, "cut"), raw, strict=True)}

    async def read(self) -> Truth:
        truth, names = self.truth, await self.names()
        queues = {name: names[name] for name in QUEUES}
        for state in (*SORTED_STATES, "cut"):
            for gid in names[state]:
                if gid in truth.groups:
                    truth.problems.append(f"{gid} is {truth.groups[gid]} and {state}")
                truth.groups[gid] = state
        truth.tombstones = set(names["tombstones"])
        for gid in sorted(truth.tombstones & truth.groups.keys()):
            truth.problems.append(f"{gid} is {truth.groups[gid]} and gone")
        truth.undecided = set(names["undecided"])
        truth.problems += [f"{i} is undecided, but not open" for i in truth.undecided if truth.groups.get(i) != "open"]
        placed = Counter(i for ids in queues.values() for i in ids)
        truth.problems += [f"{i} waits {n} times" for i, n in placed.items() if n > 1]
        returning = await self.read_returning()
        await self.read_groups([gid for gid in truth.groups if gid not in returning], queues)
        await self.read_half_gone()
        truth.problems += [f"{i} waits, but its group is gone" for i in placed if i not in truth.members]
        await self.check_leases(queues["scoring"])
        await self.check_counters()
        await self.check_steps()
        await self.check_ready_tokens()
        return truth

    async def read_groups(self, gids: list[str], queues: dict[str, list[str]]) -> None:
        raw = await self.connection.commands([("HGETALL", self.keys.of("group", gid)) for gid in gids])
        groups = {
            gid: {k.decode(): v.decode() for k, v in fields.items()} for gid, fields in zip(gids, raw, strict=True)
        }
        ids = {
            gid: [f"{gid}.{member}" for member in range(int(group["launched"]))]
            for gid, group in groups.items()
            if group
        }
        members = [i for of_group in ids.values() for i in of_group]
        hashes = await self.connection.commands([("HGETALL", self.keys.of("trajectory", i)) for i in members])
        lists = await self.connection.commands([("LRANGE", self.keys.of("segments", i), 0, -1) for i in members])
        segments = dict(zip(members, lists, strict=True))
        chunks = await load_chunks(self.connection, segments)
        fields = dict(zip(members, hashes, strict=True))
        for gid, group in groups.items():
            if not group:
                await self.check_missing_record(gid)
                continue
            records = {i: _record(fields[i]) for i in ids[gid]}
            for i, record in records.items():
                record.digest = TokenDigest().extended(decode_segments(segments[i], chunks[i]))
            self.check_group(gid, group, records, {i: fields[i] for i in ids[gid]}, queues)

    def check_group(
        self,
        gid: str,
        group: dict[str, str],
        records: dict[str, Record],
        fields_of: dict[str, dict[bytes, bytes]],
        queues: dict[str, list[str]],
    ) -> None:
        truth, state, ids = self.truth, self.truth.groups[gid], list(records)
        truth.members |= records
        states: Counter[str] = Counter()
        for trajectory_id, record in records.items():
            fields = fields_of[trajectory_id]
            states[record.state] += 1
            for queue in ("pending", "partial", "resting"):
                if (trajectory_id in queues[queue]) != (record.state == queue and state != "aside"):
                    truth.problems.append(f"{trajectory_id} is {record.state}; in the {queue} queue it is not so")
            if record.state not in DISCARDED and record.tokens != record.digest.token_count:
                truth.problems.append(f"{trajectory_id} has {record.tokens} tokens, in truth {record.digest}")
            noted = fields.get(b"d%d" % record.digest.token_count, str(record.digest).encode()).decode()
            if noted != str(record.digest):
                truth.problems.append(f"{trajectory_id} has the digest {noted}, in truth {record.digest}")
        terminal = states["scored"] + sum(states[s] for s in NOT_IN_LOSS)
        if ids and (terminal, states["scored"]) != (int(group["terminal"]), int(group["scored"])):
            truth.problems.append(f"{gid}: counters {group} but members {dict(states)}")
        self.check_end(gid, group, states)

    def check_end(self, gid: str, group: dict[str, str], states: Counter[str]) -> None:
        """Compare the state of a group with the states of its members."""
        truth, state, count = self.truth, self.truth.groups[gid], int(group["launched"])
        terminal = states["scored"] + sum(states[s] for s in NOT_IN_LOSS)
        if state == "aside" and states["pending"] + states["dead"] + states["unscorable"] != count:
            truth.problems.append(f"{gid} is set aside with {dict(states)}")
        if state in ("ready", "cut") and terminal != count:
            truth.problems.append(f"{gid} is {state} with unfinished members {dict(states)}")
        if gid in truth.undecided:
            if terminal != count or "round" not in group or "closed" in group:
                truth.problems.append(f"{gid} is undecided with {group} and members {dict(states)}")
        elif state == "open" and terminal == count:
            truth.problems.append(f"{gid} is open, but every member is terminal")
        elif state == "open" and "spare" in group and states["scored"] >= int(group["needed"]):
            truth.problems.append(f"{gid} is open, but the needed members are scored")

    async def read_returning(self) -> set[str]:
        """Return the large groups whose members are being reset; their records wait in another key."""
        raw = await self.connection.command("HGETALL", self.keys.single("returning"))
        for gid, entry in raw.items():
            if self.truth.groups.get(gid.decode()) not in ("open", "aside"):
                self.truth.problems.append(f"{gid.decode()} begins again, but is neither open nor aside")
            ids = [f"{gid.decode()}.{member}" for member in range(json.loads(entry)["members"])]
            hashes = await self.connection.commands([("HGETALL", self.keys.of("trajectory", i)) for i in ids])
            self.truth.half_gone |= {i: _record(h) for i, h in zip(ids, hashes, strict=True) if h}
        return {gid.decode() for gid in raw}

    async def read_half_gone(self) -> None:
        raw = await self.connection.command("HGETALL", self.keys.single("dropped"))
        for gid, entry in raw.items():
            first, launched = (int(entry.split()[at]) for at in (0, 4))
            ids = [f"{gid.decode()}.{member}" for member in range(launched)]
            hashes = await self.connection.commands([("HGETALL", self.keys.of("trajectory", i)) for i in ids])
            self.truth.problems += [
                f"{i} was deleted and is there" for i, h in zip(ids[:first], hashes, strict=False) if h
            ]
            self.truth.half_gone |= {i: _record(h) for i, h in zip(ids, hashes, strict=True) if h}

    async def check_missing_record(self, gid: str) -> None:
        if self.truth.groups[gid] == "cut":
            await self.check_batch_file(gid)
        else:
            self.truth.problems.append(f"{gid} is {self.truth.groups[gid]} without a record")

    async def check_batch_file(self, gid: str) -> None:
        """A cut group without a record is in a confirmed batch file."""
        step = await self.connection.command("HGET", self.keys.single("cut"), gid)
        if not await self.connection.command("HGET", self.keys.of("batch", step.decode()), "digest"):
            self.truth.problems.append(f"{gid} is cut without a record and without a batch file")

    async def check_leases(self, scoring: list[str]) -> None:
        truth = self.truth
        held: dict[str, str] = {}
        pattern = self.keys.of("held", "*").replace("{", "\\{").replace("}", "\\}")
        keys = await self.connection.command("KEYS", pattern)
        for key, members in zip(keys, await self.connection.commands([("SMEMBERS", k) for k in keys]), strict=True):
            session = key.decode().rpartition(":")[2]
            for trajectory_id in members:
                if trajectory_id.decode() in held:
                    truth.problems.append(f"{trajectory_id.decode()} is held twice")
                held[trajectory_id.decode()] = session
        for trajectory_id, record in truth.members.items():
            if record.state in HELD and trajectory_id not in scoring:
                if held.pop(trajectory_id, None) != record.session or record.session is None:
                    truth.problems.append(f"{trajectory_id} is {record.state}, but its session does not hold it")
            elif trajectory_id in scoring and (record.state != "finished" or record.session is not None):
                truth.problems.append(f"{trajectory_id} waits for scoring as {record}")
        truth.problems += [
            f"{i} is held by {s}, but its state says otherwise"
            for i, s in held.items()
            if i not in truth.half_gone or truth.half_gone[i].session != s
        ]

    async def check_counters(self) -> None:
        raw = await self.connection.command("HMGET", self.keys.single("counts"), *COUNTED)
        for name, value in zip(COUNTED, raw, strict=True):
            if int(value or 0) != self.truth.count(name):
                self.truth.problems.append(f"counter {name} is {value}, in truth {self.truth.count(name)}")

    async def check_steps(self) -> None:
        """The smallest train_step kept for a group is the one of its members that are in the loss."""
        for queue, state in (("open_steps", "open"), ("ready_steps", "ready")):
            raw = await self.connection.command("ZRANGE", self.keys.single(queue), 0, -1, "WITHSCORES")
            kept = {gid.decode(): score for gid, score in raw}
            for gid, group_state in self.truth.groups.items():
                if group_state != state:
                    continue
                steps = [
                    r.step
                    for i, r in self.truth.members.items()
                    if i.rpartition(".")[0] == gid and r.step is not None and r.state not in NOT_IN_LOSS
                ]
                expected = min(steps) if steps else (None if state == "open" else float("inf"))
                if kept.pop(gid, None) != expected:
                    self.truth.problems.append(f"{gid}: {queue} does not say {expected}")
            self.truth.problems += [f"{gid} is in {queue} for nothing" for gid in kept]

    async def check_ready_tokens(self) -> None:
        """The tokens kept for a ready group are those of its scored members."""
        raw = await self.connection.command("ZRANGE", self.keys.single("ready_tokens"), 0, -1, "WITHSCORES")
        expected = {
            gid: sum(
                r.tokens for i, r in self.truth.members.items() if i.rpartition(".")[0] == gid and r.state == "scored"
            )
            for gid, state in self.truth.groups.items()
            if state == "ready"
        }
        if (kept := {gid.decode(): int(tokens) for gid, tokens in raw}) != expected:
            self.truth.problems.append(f"ready_tokens is {kept}, in truth {expected}")


def _record(fields: dict[bytes, bytes]) -> Record:
    if not fields:
        return Record("pending", None, 0, None)
    session, step = fields.get(b"session"), fields.get(b"step")
    return Record(
        fields[b"state"].decode(),
        session.decode() if session else None,
        int(fields.get(b"tokens", 0)),
        int(step) if step is not None else None,
    )


async def read_truth(store: TrajectoryStore) -> Truth:
    """Read everything; ``problems`` is empty when the queue does not contradict itself."""
    return await _Reader(store).read()
