"""Arguments and results of the trajectory queue."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypedDict

from rollmesh.mesh import DropReason, WasteReason
from rollmesh.store.payload import NO_TOKENS, TokenDigest
from rollmesh.types import (
    FinishReason,
    ForkStatus,
    Prompt,
    RewardOutcome,
    Segment,
    TeacherColumn,
    Trajectory,
    WriteStatus,
)

WASTE_TOTALS = {
    WasteReason.UNSCORABLE: "unscorable_total",
    WasteReason.DEAD: "dead_total",
    WasteReason.SURPLUS: "surplus_total",
    WasteReason.RESTARTED: "groups_restarted_total",
    WasteReason.SET_ASIDE: "groups_set_aside_total",
    WasteReason.SHORTENED: "shortened_total",
}
"""Lifetime counter of every waste reason that is not a drop: of groups that began again, of members for the others."""
WASTE_REASONS = (*DropReason, *WasteReason)
"""Reasons for which saved tokens are never trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewGroup:
    """A group to admit: its prompt, and the number of scored trajectories that complete it."""

    group_id: str
    """``e<epoch>-<index>``; the same prompt position always has the same id."""
    prompt: Prompt
    needed: int
    epoch: int
    index: int
    expected_tokens: float | None = None
    """Expected length of a trajectory; None when unknown."""
    record_name: str = ""
    """Record of the prompt history that the group adds to; empty for the id of its prompt."""
    start_rank: int | None = None
    """0 to 127; groups of a lower rank start first, within blocks of as many groups as a batch has. None for admission
    order; the groups of one run all have a rank, or none has."""
    spare_members: int = 0
    """Trajectories launched beyond ``needed``; those unfinished when ``needed`` are scored are cut off."""
    plan: str | None = None
    """Plan of the first round, JSON; None for a group that ends with it, without a decision of the leader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedTrajectory:
    """A trajectory that the session holds after the call."""

    trajectory: Trajectory
    """Prompt and saved segments; no segments when it is new."""
    attempt: int
    """Leases without token progress, this one included; for a finished trajectory, leases to score it."""
    first_lease_time: float
    """Time of the first lease, Unix seconds of the server's clock."""
    snapshot: bytes | None = None
    """Newest argument of ``keep_snapshot``."""
    incarnation: int = 0
    """Number of restarts of the trajectory; every write of its tokens passes it."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """Plan of the round that launched the trajectory; empty in a run without rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """Result of ``fork``."""

    status: ForkStatus
    leased: LeasedTrajectory | None = None
    """The new member; None unless ``status`` is FORKED."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPlace:
    """Process that has a session of an agent, or had it last."""

    address: str
    """host:port of its API; empty once the process is gone."""
    lives: bool
    """True while a trajectory of the session is held or waits for its next lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """One partial save: tokens that follow the ``token_offset`` saved tokens."""

    trajectory_id: str
    token_offset: int
    segments: Sequence[Segment]
    generator: str = ""
    """Instance that wrote the newest tokens, for display; empty when unknown."""
    incarnation: int = 0
    """Incarnation of the tokens, from the lease or from ``restart``."""
    digest: TokenDigest = NO_TOKENS
    """Digest of the first ``token_offset`` tokens; the write is refused when the queue has other tokens."""
    mark: tuple[bytes, str, str] | None = None
    """Mark of the agent's session that the trajectory is in, its id and its name, saved in the same step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """The policy version of the first token of a trajectory that has no saved tokens."""

    trajectory_id: str
    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish(Append):
    """The last tokens of a trajectory (possibly none) and its finish reason."""

    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The outcome of a finished trajectory."""

    trajectory_id: str
    outcome: RewardOutcome
    shaped_reward: float
    assigned: bool = False
    """True when the run file assigns ``shaped_reward`` to an outcome without a value (reward.on_timeout: fixed)."""
    teacher: TeacherColumn | None = None
    """Scores of the tokens under a teacher, saved in the same step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendResult:
    """Result of one append, finish or score."""

    trajectory_id: str
    status: WriteStatus
    saved_token_count: int
    """Tokens saved after the call; 0 when lost."""


class ReleaseReason(StrEnum):
    """Reason for which a worker releases an unfinished trajectory."""

    PAUSED = "paused"
    """The mesh is paused; does not count as an attempt."""
    RESTED = "rested"
    """The trajectory has ``segment_tokens`` of one policy version; does not count as an attempt."""
    DRAINED = "drained"
    """The worker shuts down; does not count as an attempt."""
    FAILED = "failed"
    """The attempt failed; counts towards max_attempts unless tokens were saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTokens:
    """A worker's tokens of a trajectory that it holds."""

    trajectory_id: str
    token_count: Callable[[], int]
    """Current number of tokens in the worker's memory, saved or not."""
    digest_at: Callable[[int], TokenDigest]
    """Digest of the first n tokens, for any n up to ``token_count``."""
    incarnation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReRegistered:
    """Result of re-registering one trajectory with a restored queue."""

    trajectory_id: str
    kept: bool
    """False when another worker holds it, the queue has other tokens, its group is gone or the pool is full."""
    saved_token_count: int
    """Tokens in the queue: send the tokens after them again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCounts:
    """Number of trajectories and groups in every state, lifetime totals and memory."""

    trajectories: Mapping[str, int]
    """Trajectories by state: pending, partial, resting, leased, finished, scored, unscorable, dead, surplus."""
    groups: Mapping[str, int]
    """Groups by state: open, ready, cut, aside."""
    totals: Mapping[str, int]
    """Lifetime counters: admitted, ready, consumed, leases, saved_tokens, finished, regenerated, ..."""
    drops: Mapping[str, int]
    """Dropped groups by reason."""
    dropped_tokens: Mapping[str, int]
    """Saved tokens that are never trained on, by reason (WASTE_REASONS). Tokens of members without a score count as
    ``unscorable``, ``dead`` or ``surplus``, and those after the end by a group shaper as ``shortened``, even when their
    group is dropped or trained. Each token counts once."""
    drop_deciles: Mapping[str, int]
    """Dropped groups by ``<reason>:<length decile>``."""
    scoring_queue: int
    """Finished trajectories without a worker, to be scored."""
    sessions: int
    dead_letters: int
    used_memory_bytes: int
    max_memory_bytes: int
    """0 without a limit."""
    finished_lengths: Mapping[int, int] = field(default_factory=dict)
    """Finished trajectories by length bucket, floor(4 log2(tokens + 1))."""
    begun_again_deciles: Mapping[str, int] = field(default_factory=dict)
    """Groups that began again by ``<reason>:<length decile>`` of the longest member that lost its tokens; a large
    group counts once its last member is reset."""
    surplus_deciles: Mapping[str, int] = field(default_factory=dict)
    """Surplus members by length decile at the time when they were cut off."""
    oldest_rest_step: int | None = None
    """Train step of the oldest policy whose tokens are the newest ones of a resting trajectory; None if none rests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """One ledger entry: a group that left the queue untrained."""

    entry_id: str
    group_id: str
    reason: str
    token_count: int
    """Saved tokens of all its trajectories."""
    length_decile: int
    """Length decile (0 to 9) of its longest trajectory among all finished trajectories."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A permanently failed trajectory, with the data to inspect and replay it."""

    trajectory_id: str
    group_id: str
    reason: str
    time_seconds: float
    attempts: int
    token_count: int
    replayed_as: str = ""
    """Group that replays it; empty before a replay is requested."""
    trajectory: Trajectory | None = None
    """Prompt and saved segments; set only by ``dead_letter``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRequest:
    """One evaluation of one policy version."""

    evaluation_id: str
    policy_version: int
    prompt_count: int
    samples_per_prompt: int = 1


REQUESTED_PROMPTS, EXISTING_PROMPTS = "requested_prompts", "existing_prompts"
"""Details of an evaluation that had fewer prompts than evaluation.prompt_count."""


class DomainScore(TypedDict):
    """Part of an evaluation, as ``EvalResult`` describes the whole."""

    mean: float
    standard_error: float | None
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """Scores of one evaluation; a score counts only if all its tokens carry the pinned version."""

    mean: float
    standard_error: float | None
    """Standard error of the mean, over prompts; None for fewer than two prompts with a score."""
    sample_count: int
    """Scores that count."""
    discarded_count: int = 0
    """Answers that do not count."""
    details: Mapping[str, float] = field(default_factory=dict)
    """Further numbers by name (mean length, truncated share)."""
    domains: Mapping[str, DomainScore] = field(default_factory=dict)
    """Scores by domain of the prompts; empty without domains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRecord:
    """An evaluation request, its state, and its result once finished."""

    request: EvalRequest
    claimed: bool
    result: EvalResult | None
    request_time_seconds: float
    finish_time_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """Training progress recorded in Redis, for the restart of the trainer."""

    trained_step: int
    cut_step: int
    committed_step: int
    recovering: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackRequest:
    """An operator's request to continue from an older policy."""

    request_id: str
    policy_version: int
