"""The few numbers of every step that the queue keeps, so that a gateway elsewhere can draw its curves."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from rollmesh.store import KEPT_REPORTS
from rollmesh.trainer.records.run_log import StepRecords, finite
from rollmesh.trainer.service.training_session import TrainingSession

_Part = dict[str, "_Part | None"]

_REPORTED: _Part = {
    "train_step": None,
    "time": None,
    "reward_mean": None,
    "response_length_mean": None,
    "staleness_mean": None,
    "off_policy_token_share": None,
    "loss": None,
    "grad_norm": None,
    "learning_rate": None,
    "seconds": None,
    "wait_seconds": None,
    "batch": {
        "outcome_mean": None,
        "truncated_share": None,
        "masked_fraction": None,
        "trajectory_staleness": {"histogram": None},
    },
    "policy": {
        "entropy": None,
        "kl_behavior_k3": None,
        "ratio": {"mean": None},
        "effective_sample_share": None,
        "logprob_gap_pure": {"mean": None},
    },
    "mesh": {"goodput": None},
}
"""What the gateway shows of a line of metrics.jsonl; None takes a value as it is."""


def reported(record: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a line of metrics.jsonl that the queue keeps, nested as there."""
    return _part(record, _REPORTED)


class StepSummaries:
    """Keeps the reports in the queue in step with those in the run folder."""

    def __init__(self, session: TrainingSession, records: StepRecords) -> None:
        self._session = session
        self._records = records
        self._assertions = 0

    async def restore(self, train_step: int) -> None:
        """Forget the reports of later steps and fill in what the run folder has: a queue may have lost them, and so
        may a folder, whose absence takes nothing away."""
        # Read before: a Redis that comes back meanwhile makes the next report restore them again.
        self._assertions = self._session.assertions
        found = [reported(line) for line in await asyncio.to_thread(self._records.newest, KEPT_REPORTS, train_step)]
        after = found[0]["train_step"] - 1 if found and found[-1]["train_step"] == train_step else train_step
        await self._write(after, found if after < train_step else [])

    async def restore_if_lost(self, train_step: int) -> None:
        """``restore``, if Redis came back as another server since then."""
        if self._session.assertions != self._assertions:
            await self.restore(train_step)

    async def add(self, record: Mapping[str, Any]) -> None:
        """The report of a step, in the place of its own and all later ones; SessionLost under a newer trainer."""
        step = int(record["train_step"])
        await self.restore_if_lost(step - 1)
        await self._write(step - 1, [reported(record)])

    async def _write(self, after: int, records: list[dict[str, Any]]) -> None:
        session = self._session
        await session.patiently("report_steps", lambda: session.store.report_steps(session.token, after, records))


def _part(record: Mapping[str, Any], wanted: _Part) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, inner in wanted.items():
        value = record.get(key)
        if inner is None and value is not None:
            found[key] = finite(value)
        elif inner is not None and isinstance(value, Mapping):
            found[key] = _part(value, inner)
    return found
