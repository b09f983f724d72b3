"""What goes into and comes out of the trajectory queue."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from rollmesh.store.digest import NO_TOKENS, TokenDigest
from rollmesh.types import FinishReason, Prompt, RewardOutcome, Segment, Trajectory

DROP_REASONS = (
    "stale",
    "straggler_timeout",
    "run_complete",
    "rolled_back",
    "too_few_scored",
    "filtered_all_right",
    "filtered_all_wrong",
)
"""Why a group leaves the queue untrained."""
WASTE_REASONS = (*DROP_REASONS, "unscorable", "dead")
"""Why saved tokens are never trained on: their group was dropped, or they are of a member without a score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewGroup:
    """A group to admit: its prompt and how many scored trajectories complete it."""

    group_id: str
    """``e<epoch>-<index>``: the same prompt position always has the same id."""
    prompt: Prompt
    needed: int
    epoch: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedTrajectory:
    """A trajectory that the session now holds."""

    trajectory: Trajectory
    """Everything saved so far; no segments when it is new."""
    attempt: int
    """Leases without token progress, this one included; of a finished trajectory, leases to score it."""
    lease_new: bool
    """Whether it is the first lease (nothing to resume)."""
    first_lease_time: float
    """When it was first leased, Unix seconds of the server's clock."""
    snapshot: bytes | None = None
    """What ``keep_snapshot`` was given last."""
    incarnation: int = 0
    """How often the trajectory has begun again; every write of its tokens states it."""


class ForkStatus(StrEnum):
    """Whether a group got one more member."""

    FORKED = "forked"
    PAUSED = "paused"
    """Nothing is leased now."""
    POOL_FULL = "pool_full"
    """The pool has no room now."""
    GROUP_FULL = "group_full"
    """The group has had all the further members that it may have."""
    LOST = "lost"
    """The session does not hold the trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """Answer to ``fork``."""

    status: ForkStatus
    leased: LeasedTrajectory | None = None
    """The new member, when there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """One partial save: tokens that follow the ``token_offset`` already saved ones."""

    trajectory_id: str
    token_offset: int
    segments: Sequence[Segment]
    generator: str = ""
    """Instance that wrote the newest ones, for people who watch; empty when it is not known."""
    incarnation: int = 0
    """That of the tokens, as it was leased or as ``restart`` answered."""
    digest: TokenDigest = NO_TOKENS
    """Of the ``token_offset`` tokens that these follow: the write is refused when the queue has other ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """The policy version of the first token of a trajectory that has no saved tokens."""

    trajectory_id: str
    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The last tokens of a trajectory (possibly none) and why it ended."""

    trajectory_id: str
    token_offset: int
    segments: Sequence[Segment]
    finish_reason: FinishReason
    incarnation: int = 0
    """As in ``Append``."""
    digest: TokenDigest = NO_TOKENS
    """As in ``Append``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The outcome of a finished trajectory."""

    trajectory_id: str
    outcome: RewardOutcome
    shaped_reward: float
    assigned: bool = False
    """The run's policy gives ``shaped_reward`` to an outcome without a value (reward.on_timeout: fixed)."""


class WriteStatus(IntEnum):
    """What a write did to one trajectory."""

    SAVED = 1
    """Written now."""
    DUPLICATE = 2
    """Already there with the same digest: a retry; nothing changed."""
    REFUSED = 3
    """Other tokens or another incarnation are there, or tokens in between are missing: send from
    ``saved_token_count`` on, or let go."""
    LOST = 4
    """The session does not hold the trajectory (reaped, evicted, or its group is gone): let go."""

    @property
    def ok(self) -> bool:
        """Whether the write is in the queue, now or before."""
        return self <= WriteStatus.DUPLICATE


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendResult:
    """Answer to one append, finish or score."""

    trajectory_id: str
    status: WriteStatus
    saved_token_count: int
    """Tokens saved after the call; 0 when lost."""


class ReleaseReason(StrEnum):
    """Why a worker lets a trajectory go unfinished."""

    PAUSED = "paused"
    """The mesh pauses; does not count as an attempt."""
    DRAINED = "drained"
    """The worker shuts down; does not count as an attempt."""
    FAILED = "failed"
    """The attempt failed; counts towards max_attempts unless tokens were saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTokens:
    """What a worker states about a trajectory that it holds."""

    trajectory_id: str
    token_count: Callable[[], int]
    """Tokens in its memory at the moment of the call, saved or not."""
    digest_at: Callable[[int], TokenDigest]
    """Digest of the first tokens of them, for any number up to ``token_count``."""
    incarnation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReRegistered:
    """What the restored queue says about a trajectory that a worker holds."""

    trajectory_id: str
    kept: bool
    """False: another worker has it, the queue has other tokens, its group is gone, or the pool is full; drop it."""
    saved_token_count: int
    """Tokens in the queue: re-send what follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCounts:
    """Sizes of every state, lifetime totals and memory."""

    trajectories: Mapping[str, int]
    """pending, partial, leased, finished, scored, unscorable, dead: those with records in the queue."""
    groups: Mapping[str, int]
    """open, ready, cut."""
    totals: Mapping[str, int]
    """Lifetime counters: admitted, ready, consumed, leases, saved_tokens, finished, regenerated, ..."""
    drops: Mapping[str, int]
    """Dropped groups by reason."""
    dropped_tokens: Mapping[str, int]
    """Saved tokens that are never trained on, by reason (WASTE_REASONS): those of dropped groups, and as
    ``unscorable`` and ``dead`` those of members without a score, whatever became of their group. Each counts once."""
    drop_deciles: Mapping[str, int]
    """Dropped groups by ``<reason>:<length decile>``."""
    scoring_queue: int
    """Finished trajectories that no worker holds."""
    sessions: int
    dead_letters: int
    used_memory_bytes: int
    max_memory_bytes: int
    """0 without a limit."""
    finished_lengths: Mapping[int, int] = field(default_factory=dict)
    """Finished trajectories by length bucket, floor(4 log2(tokens + 1))."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """One entry of the ledger: a group that left without being trained."""

    entry_id: str
    time_seconds: float
    group_id: str
    reason: str
    token_count: int
    """Tokens saved in all its trajectories."""
    length_decile: int
    """Decile (0 to 9) of its longest trajectory among all finished ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A trajectory that gave up, with what is needed to look into it and to replay it."""

    trajectory_id: str
    group_id: str
    reason: str
    time_seconds: float
    attempts: int
    token_count: int
    replayed_as: str = ""
    """Group that replays it, once asked for."""
    trajectory: Trajectory | None = None
    """Prompt and saved segments; only when asked for one letter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRequest:
    """One evaluation of one policy version."""

    evaluation_id: str
    policy_version: int
    prompt_count: int
    samples_per_prompt: int = 1
    options: Mapping[str, str] = field(default_factory=dict)
    """Sampling and seed options, for the worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """Scores of one evaluation; a score counts only if all its tokens carry the pinned version."""

    mean: float
    standard_error: float
    sample_count: int
    """Scores that count."""
    discarded_count: int = 0
    """Answers that did not count."""
    details: Mapping[str, float] = field(default_factory=dict)
    """Further numbers by name (mean length, truncated share)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRecord:
    """An evaluation and, once it is there, its result."""

    request: EvalRequest
    claimed: bool
    result: EvalResult | None
    request_time_seconds: float
    finish_time_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """What Redis knows about the training, for the trainer's restart."""

    trained_step: int
    cut_step: int
    committed_step: int
    recovering: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackRequest:
    """A person's wish to go on from an older policy."""

    request_id: str
    policy_version: int
