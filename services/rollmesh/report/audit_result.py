"""The result of an audit: facts, problems in plain words, and the verdict that follows from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from rollmesh.errors import DataError

AUDIT_FILE = "audit.json"
_TUPLES = ("policy_versions", "staleness_violations", "problems", "unchecked", "lost", "dropped_and_trained")

LEAST_SCORED_SHARE = 0.5
"""Share of the policy's tokens that must be scored again for a green verdict; below it the audit is incomplete.

Tokens of versions that the trainer prunes (``checkpoints.keep_last``) are not asked for: the verdict line names them.
"""


class AuditVerdict(StrEnum):
    """The outcome of an audit; only ``GREEN`` ends a command with status 0."""

    GREEN = "green"
    """Everything that was checked holds, and enough was checked."""
    NOT_GREEN = "not green"
    """Something does not hold."""
    INCOMPLETE = "incomplete"
    """Nothing is known to be wrong, but too little could be checked to call the run green."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GapBounds:
    """Largest gaps between behavior_logprobs and their re-scoring, in nats."""

    token: float
    """Of a single token."""
    mean: float
    """Of the tokens of one policy version."""


GAP_BOUNDS: Mapping[str, GapBounds] = {
    "float32": GapBounds(token=1e-4, mean=2e-5),
    "bfloat16": GapBounds(token=3.0, mean=0.25),
}
"""By the engine's dtype.

float32: sums of the same products in another order; at 4,096 positions a correct program was at most 7e-5 nats from
float64, 5e-6 in the mean. bfloat16 keeps 8 significant bits, so a logit of 16 to 32 is only
known to 1/16, layer upon layer: over 27 random models of 2 to 12 layers, a correct engine was at most 0.09 nats off in
the mean and 0.57 at one token (docs/operations.md).
"""
RESOLUTION_FACTOR = 16.0
"""A float32 gap over the bound is the arithmetic's, not the engine's, when it is at most so many times what the last
float32 bit of the weights and of the positions does to that very token. Over 1e-5, gaps of correct engines were at
most 5 times of it."""
LARGEST_EXCUSED_GAP = 1e-3
"""No gap above it, in nats, is the arithmetic's."""
LEAST_MEAN_TOKENS = 16
"""Tokens of a version from which on its mean gap is judged: the worst token of a correct engine moves the mean of so
many by less than half of the bound."""
MOST_EXCUSED_SHARE = 1e-2
"""Share of the scored tokens that may be excused so."""


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
    """Tokens over the bound that the arithmetic does not explain: the engine did not run this checkpoint."""
    unresolvable: int = 0
    """Tokens over the bound that float32 does not resolve to it (``RESOLUTION_FACTOR``)."""
    largest_unresolvable: float = 0.0
    """Their largest gap."""
    not_finite: int = 0
    """Tokens whose behavior_logprob or re-scored logprob is no finite number."""
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
    """Tokens scored."""
    policy_tokens: int = 0
    """All tokens that a policy wrote."""
    skipped_impure_segments: int
    """Segments that attended to another version's cache (keep_kv): no single checkpoint reproduces them."""
    skipped_impure_tokens: int = 0
    skipped_segments: int
    """Pure segments whose checkpoint could not be opened."""
    skipped_tokens: int = 0
    pruned_tokens: int = 0
    """Those of them whose checkpoint the trainer pruned, as ``checkpoints.keep_last`` has it."""
    versions: tuple[VersionGap, ...]
    announced_manifests: int | None = None
    """Versions whose manifest is the one that the registry announced; None when the queue was not reachable."""

    @property
    def scored_share(self) -> float | None:
        """Scored tokens of all that a policy wrote, 0..1; None without any."""
        return self.tokens / self.policy_tokens if self.policy_tokens else None

    @property
    def unresolvable(self) -> int:
        """Tokens over the bound that float32 does not resolve, over all versions."""
        return sum(version.unresolvable for version in self.versions)


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
    trajectories_twice: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Trajectories that are in several groups, or several times in one, with their groups."""
    announced_step: int = -1
    """Train step of the newest policy that was announced; -1 without one."""
    unsound_states: Mapping[str, str] = field(default_factory=dict)
    """Committed trainer states that are damaged now, by folder name, with the reason."""
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
    unchecked: tuple[str, ...] = ()
    """Why too little was checked to call the run green, in plain words; empty when green."""
    green: bool = False
    """Everything that was checked holds, and enough was checked."""

    @property
    def verdict(self) -> AuditVerdict:
        """One of three: a problem outweighs an incomplete check."""
        if self.green:
            return AuditVerdict.GREEN
        return AuditVerdict.INCOMPLETE if self.unchecked and not self.problems else AuditVerdict.NOT_GREEN

    def to_json(self, indent: int | None = 2) -> str:
        """One JSON object, the verdict included."""
        return json.dumps({**asdict(self), "verdict": self.verdict}, indent=indent, sort_keys=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Inverse of ``to_json``; raises DataError for something else."""
        try:
            data = json.loads(text)
            data.pop("verdict", None)
            data["damaged"] = {int(k): v for k, v in data.get("damaged", {}).items()}
            data["staleness_counts"] = {int(k): v for k, v in data.get("staleness_counts", {}).items()}
            data["trained_twice"] = {k: tuple(v) for k, v in data.get("trained_twice", {}).items()}
            data["trajectories_twice"] = {k: tuple(v) for k, v in data.get("trajectories_twice", {}).items()}
            for name in _TUPLES:
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
