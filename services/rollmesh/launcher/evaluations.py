"""Evaluations as the launcher writes them down."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass

from rollmesh.launcher.run_folder import RunFolder
from rollmesh.store import TrajectoryStore
from rollmesh.store.types import EvalRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One line of ``evaluations.jsonl``."""

    policy_version: int
    n: int
    """Scores that count."""
    mean: float
    standard_error: float
    details: dict[str, float]
    """Mean length and the like."""
    discarded: int
    when: float
    """Unix seconds."""
    seconds: float
    """From the request to the result."""

    def to_json(self) -> str:
        """The line; details stand beside the other fields."""
        record = {
            "policy_version": self.policy_version,
            "n": self.n,
            "mean": self.mean,
            "standard_error": self.standard_error,
            "discarded": self.discarded,
            "when": self.when,
            "seconds": self.seconds,
            **self.details,
        }
        return json.dumps(record)


class EvaluationJournal:
    """Notes every evaluation once it has a result, and keeps ``evaluations.jsonl`` up to date."""

    def __init__(self, store: TrajectoryStore, folder: RunFolder, note: Callable[[str], None]) -> None:
        self._store = store
        self._folder = folder
        self._note = note
        self._written: set[int] | None = None

    async def update(self) -> None:
        """Look for new results; those from before this start are written, not noted."""
        found = [_evaluation(record) for record in await self._store.evaluations() if record.result is not None]
        written = {e.policy_version for e in found}
        if written == self._written:
            return
        for e in sorted(found, key=lambda e: e.policy_version):
            if self._written is not None and e.policy_version not in self._written:
                self._note(
                    f"policy version {e.policy_version}: evaluation {e.mean:.3f} ± {e.standard_error:.3f} (n={e.n})"
                )
        self._written = written
        lines = [evaluation.to_json() + "\n" for evaluation in sorted(found, key=lambda e: e.policy_version)]
        fresh = self._folder.evaluations.with_suffix(".tmp")
        fresh.write_text("".join(lines), encoding="utf-8")
        os.replace(fresh, self._folder.evaluations)


async def finished_evaluation(store: TrajectoryStore, policy_version: int) -> Evaluation | None:
    """The result for one policy version, if there is one."""
    for record in await store.evaluations():
        if record.request.policy_version == policy_version and record.result is not None:
            return _evaluation(record)
    return None


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
        discarded=result.discarded_count,
        when=finished,
        seconds=finished - record.request_time_seconds,
    )
