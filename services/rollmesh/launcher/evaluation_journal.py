"""Evaluations, and the journal in which the launcher records them.

The file preserves the scores of the run. A queue lost with its disk, or empty after the restore of a backup, contains
no scores, and the weights of most versions are pruned by then.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rollmesh.file_writes import write_text
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.report.console import domain_scores, fewer_prompts, plus_minus
from rollmesh.report.recorded_run import read_json_lines
from rollmesh.store import TrajectoryStore
from rollmesh.store.queue_types import EXISTING_PROMPTS, REQUESTED_PROMPTS, DomainScore, EvalRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One line of ``evaluations.jsonl``."""

    policy_version: int
    n: int
    """Number of scores in the mean."""
    mean: float
    standard_error: float | None
    """None for fewer than two prompts with a score."""
    details: dict[str, float]
    """Other statistics, such as the mean length."""
    discarded: int
    when: float
    """Unix seconds."""
    seconds: float
    """Seconds from the request to the result."""
    domains: Mapping[str, DomainScore]
    """Scores by domain of the prompts; empty without domains."""

    def to_json(self) -> str:
        """Return the JSON line, with the details next to the other fields."""
        record = asdict(self)
        details = record.pop("details")
        return json.dumps(record | details)

    @property
    def description(self) -> str:
        """Describe the score for the console; there is none when every response was discarded."""
        if self.n == 0:
            return f"evaluation without a score: none of {self.discarded} answers counts"
        whole = f"evaluation {self.mean:.3f} {plus_minus(self.standard_error)} (n={self.n}){self.shortage}"
        return whole + "".join(f"; {line}" for line in domain_scores(self.domains))

    @property
    def shortage(self) -> str:
        """Reason for fewer prompts than requested, as the end of a sentence; empty if there were enough."""
        if REQUESTED_PROMPTS not in self.details:
            return ""
        return f"; {fewer_prompts(self.details[REQUESTED_PROMPTS], self.details[EXISTING_PROMPTS])}"


_NOT_NUMBERS = ("details", "standard_error", "domains")


class EvaluationJournal:
    """Journal of finished evaluations: notes each new result and updates ``evaluations.jsonl``."""

    def __init__(self, store: TrajectoryStore, folder: RunFolder, note: Callable[[str], None]) -> None:
        self._store = store
        self._folder = folder
        self._note = note
        self._written: set[int] | None = None

    async def update(self) -> None:
        """Read new results from the store; note only those that finished after this start."""
        newest = await self._store.policies.latest()
        if newest is None:  # an empty queue has no evaluations yet; keep the file
            return
        found = {e.policy_version: e for e in await self._in_store()}
        if found.keys() == self._written:
            return
        for version in sorted(found):
            if self._written is not None and version not in self._written:
                self._note(f"policy version {version}: {found[version].description}")
        self._written = set(found)
        # Omit lines of versions newer than the newest: the run was restored from an older copy.
        recorded = (e for e in _recorded(self._folder.evaluations) if e.policy_version <= newest.policy_version)
        lines = {e.policy_version: e for e in recorded}
        lines |= {v: e for v, e in found.items() if e.n or v not in lines}
        fresh = self._folder.evaluations.with_suffix(".tmp")
        write_text(fresh, "".join(lines[version].to_json() + "\n" for version in sorted(lines)))
        os.replace(fresh, self._folder.evaluations)

    async def finished(self, policy_version: int) -> Evaluation | None:
        """Return the result for one policy version, if any.

        A line of the file is used for version 0 only. Later numbers may name other weights than the file does: a
        restored copy of the checkpoints continues from an older version than the file contains.
        """
        in_store = {e.policy_version: e for e in await self._in_store()}
        if policy_version == 0 and 0 not in in_store:
            in_store |= {e.policy_version: e for e in _recorded(self._folder.evaluations) if e.policy_version == 0}
        return in_store.get(policy_version)

    async def _in_store(self) -> list[Evaluation]:
        return [_evaluation(record) for record in await self._store.evaluations.all() if record.result is not None]


def _recorded(file: Path) -> Iterable[Evaluation]:
    names = [field.name for field in fields(Evaluation) if field.name not in _NOT_NUMBERS]
    for line in read_json_lines(file).records:
        values: dict[str, Any] = {name: line.get(name) for name in names}
        if all(isinstance(value, int | float) for value in values.values()) and values["n"] > 0:
            others = {name: float(v) for name, v in line.items() if name not in names and isinstance(v, int | float)}
            error, domains = others.pop("standard_error", None), line.get("domains", {})
            yield Evaluation(**values, standard_error=error, details=others, domains=domains)


def _evaluation(record: EvalRecord) -> Evaluation:
    result = record.result
    finished = record.finish_time_seconds
    if result is None or finished is None:
        raise ValueError(f"evaluation {record.request.evaluation_id} has no result yet")
    return Evaluation(
        policy_version=record.request.policy_version,
        n=result.sample_count,
        mean=result.mean,
        standard_error=result.standard_error,
        details=dict(result.details),
        domains=result.domains,
        discarded=result.discarded_count,
        when=finished,
        seconds=finished - record.request_time_seconds,
    )
