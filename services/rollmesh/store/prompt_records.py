"""Prompt history in the queue: one record per prompt, and the outcomes that no batch file has yet.

A run keeps it if RunLimits.keeps_history is true. It has at most 1,048,576 prompts of about 100 bytes each; a later new
prompt has no record (``history_full_total`` in the counts).
"""

from collections.abc import Sequence

from rollmesh.prompt_history import DomainTotals, LengthPrediction, PromptOutcome, PromptRecord, domain_record
from rollmesh.store.limits import QueuePart

_OUTCOMES_PER_CALL = 256
"""Each may touch the record of its group."""
_PROMPTS_PER_READ = 512
_MOST_CHANGES = 4096
"""Most changes that are read one by one."""
_MILLIONTHS = 1_000_000


class PromptRecords(QueuePart):
    """Reads of the prompt history by the leader, and its copy in batch files by the trainer."""

    async def read(self, prompt_ids: Sequence[str]) -> dict[str, PromptRecord]:
        """Return the records of these prompts; prompts of which no group has ended are left out."""
        found: dict[str, PromptRecord] = {}
        for at in range(0, len(prompt_ids), _PROMPTS_PER_READ):
            part = prompt_ids[at : at + _PROMPTS_PER_READ]
            raw = await self._connection.command("HMGET", self._keys.single("history"), *part)
            found |= {i: _record(text) for i, text in zip(part, raw, strict=True) if text is not None}
        return found

    async def changed(self, since: int | None) -> tuple[int, dict[str, PromptRecord]]:
        """Return the number of the newest change, and the records that have changed after change ``since``.

        All records are returned without ``since``, and if the changes are no longer known one by one.
        """
        meta, changes = self._keys.single("meta"), self._keys.single("changes")
        newest = int(await self._connection.command("HGET", meta, "history_changes") or 0)
        if since == newest:
            return newest, {}
        if since is not None and 0 < newest - since <= _MOST_CHANGES:
            entries = await self._connection.command("XRANGE", changes, f"{since + 1}-0", f"{newest}-0")
            if len(entries) == newest - since:
                return newest, await self.read(sorted({fields[b"name"].decode() for _, fields in entries}))
        found: dict[str, PromptRecord] = {}
        cursor: int | None = None
        while cursor != 0:
            cursor, part = await self._connection.command(
                "HSCAN", self._keys.single("history"), cursor or 0, "COUNT", _PROMPTS_PER_READ
            )
            found |= {name.decode(): _record(text) for name, text in part.items()}
        return newest, found

    async def in_progress(self) -> list[str]:
        """Return the record name of each unfinished group that has one."""
        return [name.decode() for name in await self._connection.run("prompts_in_progress")]

    async def drawn(self) -> dict[str, int]:
        """Return the number of admitted groups by domain."""
        raw = await self._connection.command("HGETALL", self._keys.single("domains"))
        return {name.decode(): int(count) for name, count in sorted(raw.items())}

    async def domain_totals(self) -> dict[str, DomainTotals]:
        """Return the sums of every domain, by name; empty without domains."""
        drawn = await self.drawn()
        records = await self.read([domain_record(domain) for domain in drawn])
        found: dict[str, DomainTotals] = {}
        for domain, groups in drawn.items():
            record = records.get(domain_record(domain))
            sums = (record.members, record.solved, record.token_sum) if record is not None else (0, 0, 0)
            found[domain] = DomainTotals(drawn=groups, completed=sums[0], solved=sums[1], tokens=sums[2])
        return found

    async def predictions(self) -> list[LengthPrediction]:
        """Return the newest predictions of lengths, at most 256, the newest first."""
        raw = await self._connection.command("LRANGE", self._keys.single("predictions"), 0, -1)
        numbers = [[None if word == b"-" else float(word) for word in text.split()] for text in raw]
        return [LengthPrediction(expected, mean or 0.0, first, rest) for expected, mean, first, rest in numbers]

    async def size(self) -> int:
        """Return the number of prompts with a record."""
        return int(await self._connection.command("HLEN", self._keys.single("history")))

    async def unsaved(self, trainer_session: str, train_step: int) -> list[PromptOutcome]:
        """Return the outcomes for the batch file of a train step: those that no earlier file has.

        Raises Conflict while the outcomes of an earlier file are missing here, because Redis came back with an earlier
        state: re-assert the files first.
        """
        if not (await self._limits.get()).keeps_history:
            return []
        flat = await self._connection.run("unsaved_outcomes", trainer_session, train_step)
        return sorted(_outcome(group_id, text) for group_id, text in zip(flat[0::2], flat[1::2], strict=True))

    async def save(self, trainer_session: str, train_step: int, outcomes: Sequence[PromptOutcome], run_id: str) -> None:
        """Take the outcomes of a batch file on disk: they are saved, and those that Redis has lost are added again.

        Files are taken in the order of their steps; repeats, and files before a later one, change nothing. ``run_id``
        is that of the server that has the batch file: raises StoreUnavailable when Redis came back as another one.
        """
        if not (await self._limits.get()).keeps_history:
            return
        first, last = 0, False
        while not last:
            part = outcomes[first : first + _OUTCOMES_PER_CALL]
            last = first + len(part) >= len(outcomes)
            words = [word for outcome in part for word in (outcome.group_id, _text(outcome))]
            session, end = trainer_session, int(last)
            done = int(await self._connection.run("save_outcomes", session, train_step, first, end, run_id, *words))
            if done < 0:
                return
            last, first = last and done == first + len(part), done


def _record(text: bytes) -> PromptRecord:
    groups, members, solved, rewards, tokens, longest, step = map(int, text.split())
    return PromptRecord(
        groups=groups,
        members=members,
        solved=solved,
        reward_sum=rewards / _MILLIONTHS,
        token_sum=tokens,
        longest=longest,
        train_step=step,
    )


def _outcome(group_id: bytes, text: bytes) -> PromptOutcome:
    *numbers, last, prompt_id = text.decode().split(" ", 6)
    step, _, domain = last.partition("@")
    members, solved, rewards, tokens, longest = map(int, numbers)
    return PromptOutcome(group_id.decode(), prompt_id, members, solved, rewards, tokens, longest, int(step), domain)


def _text(outcome: PromptOutcome) -> str:
    _, prompt_id, *numbers, domain = outcome
    step = f"@{domain}" if domain else ""
    return f"{' '.join(map(str, numbers))}{step} {prompt_id}"
