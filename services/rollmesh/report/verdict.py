"""The result of an audit: facts, problems in plain words, and whether the run is green."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from rollmesh.errors import DataError

AUDIT_FILE = "audit.json"

LOGPROB_BOUNDS: Mapping[str, float] = {"float32": 1e-4, "bfloat16": 0.1}
"""Largest gap between a behavior_logprob and its re-scoring, by the engine's dtype, in nats.

float32: sums of the same products in another order. bfloat16 keeps 8 significant bits, so a logit of 16 to 32 is only
known to 1/16 and two correct engines differ by that much; the bound is reported, and does not decide.
"""
DECIDING_DTYPES = frozenset({"float32"})
RESOLUTION_FACTOR = 16.0
"""A gap over the bound is the arithmetic's, not the engine's, when it is at most so many times what the last float32
bit of the weights does to that very token. Over 1e-5, gaps of correct engines were 1 to 5 times of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionGap:
    """Re-scoring of the pure segments that name one policy version."""

    policy_version: int
    train_step: int | None
    """None when no source names the version."""
    segments: int
    """Pure segments in the batch files."""
    tokens: int
    largest_gap: float | None
    """Largest \\|behavior_logprob - re-scored logprob\\| in nats; None when nothing was scored."""
    mean_gap: float | None
    over_bound: int = 0
    """Tokens over the bound that float32 resolves: the engine did not run this checkpoint."""
    unresolvable: int = 0
    """Tokens over the bound that float32 does not resolve to it (``RESOLUTION_FACTOR``)."""
    skipped: str = ""
    """Why its segments were not scored: the checkpoint is gone or refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescoring:
    """Re-scoring of every pure segment with the checkpoint that it names."""

    dtype: str
    """Dtype that the engine computed in; re-scoring is in float32, and in float64 where that leaves doubt."""
    bound: float
    largest_gap: float | None
    segments: int
    """Segments scored."""
    tokens: int
    skipped_impure_segments: int
    """Segments that attended to another version's cache (keep_kv): no single checkpoint reproduces them."""
    skipped_segments: int
    """Pure segments whose checkpoint could not be opened."""
    versions: tuple[VersionGap, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditResult:
    """What an audit found; every count is from batch files and committed trainer states unless it says otherwise."""

    run: str
    committed_step: int
    """Train step of the newest committed trainer state; -1 without one."""
    batch_files: int
    """Batch files up to the committed step."""
    damaged: Mapping[int, str] = field(default_factory=dict)
    """Train steps whose batch file is missing or refused, with the reason."""
    groups: int = 0
    trajectories: int = 0
    trained_tokens: int = 0
    """Tokens in the loss."""
    policy_versions: tuple[int, ...] = ()
    """Versions whose tokens were trained on, ascending."""
    trained_twice: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Groups in more than one batch file, with their train steps."""
    off_policy_token_share: float | None = None
    """Tokens in the loss that an older policy than the newest one wrote, 0..1."""
    max_staleness: int | None = None
    """The run's bound, in train steps."""
    largest_staleness: int | None = None
    mean_staleness: float | None = None
    staleness_counts: Mapping[int, int] = field(default_factory=dict)
    """Trajectories by staleness."""
    staleness_violations: tuple[str, ...] = ()
    """Trajectories over the bound."""
    staleness_unknown: int = 0
    """Trajectories with tokens of a version whose train step nothing names."""
    lost: tuple[str, ...] | None = None
    """Admitted groups that are in no batch file, not in the queue and without a reason; None when not checked."""
    lost_note: str = ""
    """Why ``lost`` was not checked, or what it was checked against."""
    forgotten: bool = False
    """Whether a batch file knows of later prompts than the queue's cursor: Redis came back as an earlier state."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Groups by the reason for which they left untrained (from the queue's ledger)."""
    dropped_and_trained: tuple[str, ...] = ()
    """Groups that the queue's ledger has as dropped and a batch file has all the same: they count as trained."""
    rescoring: Rescoring | None = None
    problems: tuple[str, ...] = ()
    """What does not hold, in plain words; empty when green."""
    green: bool = False
    """Everything that was checked holds, and something was checked."""

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self), indent=2, sort_keys=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Inverse of ``to_json``; raises DataError for something else."""
        try:
            data = json.loads(text)
            data["damaged"] = {int(k): v for k, v in data.get("damaged", {}).items()}
            data["staleness_counts"] = {int(k): v for k, v in data.get("staleness_counts", {}).items()}
            data["trained_twice"] = {k: tuple(v) for k, v in data.get("trained_twice", {}).items()}
            for name in ("policy_versions", "staleness_violations", "problems", "lost", "dropped_and_trained"):
                if data.get(name) is not None:
                    data[name] = tuple(data[name])
            data["rescoring"] = _rescoring(data.get("rescoring"))
            return cls(**data)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise DataError(f"{AUDIT_FILE}: not an audit: {error}") from error


def read_audit(run_folder: Path) -> AuditResult | None:
    """The last audit of a run; None without one. Raises DataError for a file that is no audit."""
    try:
        text = (run_folder / AUDIT_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    return AuditResult.from_json(text)


def _rescoring(data: Any) -> Rescoring | None:
    if data is None:
        return None
    versions = tuple(VersionGap(**version) for version in data.pop("versions"))
    return Rescoring(**data, versions=versions)
