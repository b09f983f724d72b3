"""Result of an audit: facts, descriptions of problems, and the verdict."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Self

from pydantic import TypeAdapter, ValidationError

from rollmesh.errors import DataError

AUDIT_FILE = "audit.json"

LEAST_SCORED_SHARE = 0.5
"""Share of the policy's tokens that must be scored again for a green verdict, without those that were pruned."""
MOST_PRUNED_SHARE = 0.25
"""Largest share of the policy's tokens, for a green verdict, whose versions ``checkpoints.keep_last`` has pruned.

Nothing shows which policy sampled a token whose version is gone: it may be any number of nats off.
"""


class AuditVerdict(StrEnum):
    """Outcome of an audit; only ``GREEN`` gives a command the exit status 0."""

    GREEN = "green"
    """Every check passed, and enough was checked."""
    NOT_GREEN = "not green"
    """A check failed."""
    INCOMPLETE = "incomplete"
    """No check failed, but too little could be checked for a green verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GapBounds:
    """Bounds on the gap between behavior_logprobs and their re-scoring, in nats."""

    token: float
    """Bound for a single token."""
    mean: float
    """Bound for the mean over the tokens of one policy version."""


GAP_BOUNDS: Mapping[str, GapBounds] = {
    "float32": GapBounds(token=1e-4, mean=2e-5),
    "bfloat16": GapBounds(token=3.0, mean=0.25),
}
"""Bounds by the dtype of the engine.

float32: the gap comes from summing the same products in another order. At 4,096 positions, a correct program was at
most 7e-5 nats from float64, and 5e-6 in the mean. bfloat16: 8 significant bits resolve a logit of 16 to 32 to 1/16, and
the error accumulates over the layers. Over 27 random models of 2 to 12 layers, a correct engine was at most 0.09 nats
off in the mean and 0.57 at one token (docs/audit.md).
"""
LARGE_MEAN = 0.02
"""Mean gap of a bfloat16 version, in nats, over which its own rounding bounds it (``ROUNDING_FACTOR``)."""
ROUNDING_FACTOR = 4.0
"""Largest multiple, in the mean, of the gap between the trainer's program in bfloat16 and in float32.

Over 30 random models of 2 and 8 layers, a correct engine was at 0.9 to 1.2 times this gap; over any 16 tokens, at most
at 2.8 times. A policy of which a part is missing or old is farther away, although its mean may be below ``GapBounds``.
"""
RESOLUTION_FACTOR = 16.0
"""Largest multiple of a token's resolution up to which a float32 gap over the bound counts as rounding.

The resolution is the effect of the last float32 bit of the weights and the positions on the logprob of that token. Gaps
over 1e-5 of correct engines were at most 5 times their resolution. No size in nats bounds the excuse: a token that is
near a tie of a sharp policy may have any. Such tokens are few (``MOST_EXCUSED_SHARE``), and a fault of the engine shows
at the others.
"""
LEAST_MEAN_TOKENS = 16
"""Minimum number of tokens of a version for a check of its mean gap.

The worst token of a correct engine moves the mean over 16 tokens by less than half of the bound.
"""
MOST_EXCUSED_SHARE = 1e-2
"""Maximum share of the scored tokens over the bound by rounding, of a run and of each version."""
FEW_EXCUSED = 20
"""Number of tokens over the bound by rounding that a version may have in any case: a share of few tokens is chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionGap:
    """Re-scoring of the pure segments of one policy version."""

    policy_version: int
    train_step: int | None
    """Train step of the version; None when no source records it."""
    segments: int
    """Pure segments in the batch files."""
    tokens: int
    largest_gap: float | None
    """Largest \\|behavior_logprob - re-scored logprob\\| in nats; None without scored tokens."""
    mean_gap: float | None
    mean_bound: float
    """Bound on the mean gap, in nats."""
    over_bound: int = 0
    """Tokens over the bound beyond rounding: the engine did not run this checkpoint."""
    unresolvable: int = 0
    """Tokens over the bound by float32 rounding (``RESOLUTION_FACTOR``)."""
    largest_unresolvable: float = 0.0
    """Largest gap of the ``unresolvable`` tokens."""
    not_finite: int = 0
    """Tokens whose behavior_logprob or re-scored logprob is not finite."""
    skipped: str = ""
    """Reason for skipping the segments: the checkpoint is missing or rejected; empty when they were scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescoring:
    """Re-scoring of every pure segment with the checkpoint of its policy version."""

    dtype: str
    """Dtype of the engine; re-scoring uses float32, and float64 for large gaps."""
    bound: float
    largest_gap: float | None
    segments: int
    """Segments scored."""
    tokens: int
    """Tokens scored."""
    policy_tokens: int = 0
    """All sampled tokens."""
    skipped_impure_segments: int
    """Segments that attended to the KV cache of another version (keep_kv); no single checkpoint reproduces them."""
    skipped_impure_tokens: int = 0
    skipped_segments: int
    """Pure segments without a usable checkpoint."""
    skipped_tokens: int = 0
    pruned_tokens: int = 0
    """Skipped tokens whose checkpoint the trainer pruned according to ``checkpoints.keep_last``."""
    versions: tuple[VersionGap, ...]
    announced_manifests: int | None = None
    """Versions whose manifest matches the registry; None when the queue was unreachable."""

    @property
    def is_pruned(self) -> bool:
        """True if too many versions were pruned for a green verdict."""
        return self.pruned_tokens > MOST_PRUNED_SHARE * self.policy_tokens

    @property
    def scored_share(self) -> float | None:
        """Share of the sampled tokens that were scored again, 0..1; None without sampled tokens."""
        return self.tokens / self.policy_tokens if self.policy_tokens else None

    @property
    def unresolvable(self) -> int:
        """Tokens over the bound by float32 rounding, over all versions."""
        return sum(version.unresolvable for version in self.versions)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherCheck:
    """Columns of one teacher in the batch files."""

    teacher: str
    manifest_digests: tuple[str, ...]
    """Digests of the models that computed them; one in a sound run."""
    columns: int
    tokens: int
    missing: tuple[str, ...] = ()
    """Trajectories of its prompts without a column of it."""
    unsound: tuple[str, ...] = ()
    """Trajectories whose column has another number of scores than they have tokens, or scores that are not finite."""
    checked_columns: int = 0
    """Columns of a random sample that were computed again with its model."""
    checked_tokens: int = 0
    largest_gap: float | None = None
    """Largest gap of these, in nats; None if none was computed again."""
    over_bound: int = 0
    """Log-probabilities over the bound of its dtype beyond rounding."""
    note: str = ""
    """Reason why none was computed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditResult:
    """Result of an audit; counts come from batch files and committed trainer states unless stated otherwise."""

    run: str
    committed_step: int
    """Train step of the newest committed trainer state; -1 without one."""
    batch_files: int
    """Batch files up to the committed step."""
    damaged: Mapping[int, str] = field(default_factory=dict)
    """Train steps with a missing or rejected batch file, with the reason."""
    groups: int = 0
    trajectories: int = 0
    trained_tokens: int = 0
    """Tokens that are not too old for the loss, before token masks."""
    policy_versions: tuple[int, ...] = ()
    """Versions of the trained tokens, ascending."""
    trained_twice: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Groups in more than one batch file, with their train steps."""
    trajectories_twice: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Trajectories in several groups, or several times in one group, with their groups."""
    replayed_groups: int = 0
    """Groups of earlier batches that train steps trained on again (trainer.replay); not in the other counts."""
    replay_staleness: Mapping[int, int] = field(default_factory=dict)
    """Number of replayed groups by the staleness of their oldest token."""
    replay_problems: tuple[str, ...] = ()
    """Replayed groups that are not those that the seed draws from the batch files."""
    announced_step: int = -1
    """Train step of the newest announced policy; -1 without one."""
    unsound_states: Mapping[str, str] = field(default_factory=dict)
    """Damaged trainer states by folder name, with the reason."""
    off_policy_token_share: float | None = None
    """Share of these tokens that an older policy than the newest one sampled, 0..1."""
    max_staleness: int | None = None
    """Staleness bound of the run, in train steps."""
    largest_staleness: int | None = None
    mean_staleness: float | None = None
    staleness_counts: Mapping[int, int] = field(default_factory=dict)
    """Number of trajectories by staleness."""
    staleness_violations: tuple[str, ...] = ()
    """Trajectories over the staleness bound."""
    staleness_unknown: int = 0
    """Trajectories with tokens of a version with unknown train step."""
    lost: tuple[str, ...] | None = None
    """Admitted groups in no batch file, not in the queue and without a reason in the ledger; None when not checked."""
    lost_note: str = ""
    """Reason why ``lost`` was not checked, or the state of the queue that it was checked against."""
    forgotten: bool = False
    """True if a batch file records later prompts than the queue's cursor: Redis was restored to an earlier state."""
    copies_note: str = ""
    """Copies in the bucket that were compared with their digests; empty for a folder."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Number of untrained groups by the reason of their removal, from the ledger of the queue."""
    dropped_and_trained: tuple[str, ...] = ()
    """Groups that the ledger lists as dropped although a batch file contains them; they count as trained."""
    rescoring: Rescoring | None = None
    teachers: tuple[TeacherCheck, ...] = ()
    """Columns of each teacher; empty in a run without teachers."""
    problems: tuple[str, ...] = ()
    """Descriptions of the failed checks; empty when green."""
    unchecked: tuple[str, ...] = ()
    """Reasons why too little was checked for a green verdict; empty when green."""
    green: bool = False
    """True if every check passed and enough was checked."""

    @property
    def verdict(self) -> AuditVerdict:
        """Verdict of the audit; a problem takes precedence over an incomplete check."""
        if self.green:
            return AuditVerdict.GREEN
        return AuditVerdict.INCOMPLETE if self.unchecked and not self.problems else AuditVerdict.NOT_GREEN

    @property
    def is_accepted(self) -> bool:
        """True if green, or if nothing but what ``checkpoints.keep_last`` has pruned is missing for it."""
        pruned = self.rescoring is not None and self.rescoring.is_pruned
        return self.green or (pruned and not self.problems and len(self.unchecked) == 1)

    def to_json(self, indent: int | None = 2) -> str:
        """Return the result as one JSON object, including the verdict."""
        return json.dumps({**asdict(self), "verdict": self.verdict}, indent=indent, sort_keys=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the output of ``to_json``. Raises DataError for any other text."""
        try:
            return TypeAdapter(cls).validate_json(text)
        except ValidationError as error:
            raise DataError(f"{AUDIT_FILE}: not an audit result: {error}") from error


def read_audit(run_folder: Path) -> AuditResult | None:
    """Read the last audit of a run; None without one. Raises DataError for an invalid file."""
    try:
        text = (run_folder / AUDIT_FILE).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    return AuditResult.from_json(text)
