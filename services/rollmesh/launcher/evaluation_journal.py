"""Journal in which the launcher records evaluations.

The file preserves the scores of the run. A queue lost with its disk, or empty after the restore of a backup, contains
no scores, and the weights of most versions are pruned by then.
"""

import os
from collections.abc import Callable

from rollmesh.file_writes import write_text
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.report.recorded_run import Evaluation, read_json_lines
from rollmesh.store import TrajectoryStore
from rollmesh.store.queue_types import EvalRecord


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
        lines = {e.policy_version: e for e in self._recorded() if e.policy_version <= newest.policy_version}
        lines |= {v: e for v, e in found.items() if e.n or v not in lines}
        fresh = self._folder.evaluations.with_suffix(".tmp")
        write_text(fresh, "".join(lines[version].to_json() + "\n" for version in sorted(lines)))
        os.replace(fresh, self._folder.evaluations)

    async def finished(self, policy_version: int) -> Evaluation | None:
        """Return the result for one policy version, if any.

        A line of the file is used for version 0 only. Later numbers may name other weights than the file does: a
        restored copy of the checkpoints continues from an older version than the file contains.
        """
        found = [*(self._recorded() if policy_version == 0 else ()), *await self._in_store()]
        return {e.policy_version: e for e in found}.get(policy_version)

    def _recorded(self) -> list[Evaluation]:
        return Evaluation.read(read_json_lines(self._folder.evaluations).records)

    async def _in_store(self) -> list[Evaluation]:
        return [_evaluation(record) for record in await self._store.evaluations.all() if record.result is not None]


def _evaluation(record: EvalRecord) -> Evaluation:
    result, finished = record.result, record.finish_time_seconds
    assert result is not None and finished is not None
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
