"""Core data types as frozen dataclasses, one word per thing.

They carry data within a process; messages between processes are protobuf (``wire/``), and run files are pydantic models
(``config/``). Arrays are numpy, one-dimensional and never mutated after construction.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
FloatArray = npt.NDArray[np.float32] | npt.NDArray[np.float64]


class FinishReason(StrEnum):
    """Reason for the end of a generation call or a trajectory."""

    STOP = "stop"
    """A stop token was sampled; it is the last token."""
    LENGTH = "length"
    """The token budget or the context length was used up."""
    INTERRUPTED = "interrupted"
    """The generator stopped early; the tokens so far are valid and the trajectory can be resumed."""
    ENVIRONMENT = "environment"
    """The environment ended the episode."""


class SegmentSource(StrEnum):
    """Origin of the tokens of a segment."""

    POLICY = "policy"
    ENVIRONMENT = "environment"


class TrajectoryState(StrEnum):
    """Lifecycle of a trajectory in the queue."""

    PENDING = "pending"
    LEASED = "leased"
    PARTIAL = "partial"
    RESTING = "resting"
    """Partial, and not leased before the policy moves on, or nothing else can run."""
    FINISHED = "finished"
    SCORED = "scored"
    UNSCORABLE = "unscorable"
    DEAD = "dead"
    SURPLUS = "surplus"
    """Cut off unfinished, because enough other members of its group are scored."""


class WriteStatus(IntEnum):
    """Effect of a write on one trajectory."""

    SAVED = 1
    """Written by this call."""
    DUPLICATE = 2
    """Saved before with the same digest: a retry; nothing changed."""
    REFUSED = 3
    """The queue has other tokens or another incarnation, or tokens in between are missing: send from
    ``saved_token_count`` on, or drop the trajectory."""
    LOST = 4
    """The session does not hold the trajectory (reaped, evicted, or its group is gone): drop it."""

    @property
    def ok(self) -> bool:
        """True when the queue has the write, from this call or an earlier one."""
        return self <= WriteStatus.DUPLICATE


class ForkStatus(StrEnum):
    """Outcome of a request for one more member of a group."""

    FORKED = "forked"
    PAUSED = "paused"
    """The run is paused: nothing is leased now."""
    POOL_FULL = "pool_full"
    """The pool has no room now."""
    GROUP_FULL = "group_full"
    """The group has reached its maximum number of members."""
    LOST = "lost"
    """The session does not hold the trajectory."""


class OutcomeKind(StrEnum):
    """Outcome of scoring an answer; only ``SCORED`` has a value."""

    SCORED = "scored"
    TIMED_OUT = "timed_out"
    VERIFIER_ERROR = "verifier_error"


LOWEST_TEMPERATURE = 1e-3
"""Smallest softmax temperature above 0; a float32 logit divided by a smaller one overflows."""
LARGEST_REWARD = 1e9
"""Largest reward, advantage and loss of a token in size: sums and squares of larger ones may overflow float32."""
LOWEST_LOGPROB = -1e4
"""Smallest log-probability of a sampled token; engines write the smallest float for a token that was ruled out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of token sampling."""

    temperature: float = 1.0
    """Softmax temperature, at least ``LOWEST_TEMPERATURE``; 0 is greedy, for evaluation only."""
    top_p: float = 1.0
    """Nucleus mass, of the tokens that top-k keeps; 1 keeps all."""
    top_k: int = 0
    """Number of most likely tokens kept; 0 keeps all."""
    min_p: float = 0.0
    """Smallest probability kept, as a share of the most likely token's; 0 keeps all."""
    kept_tokens: int = 0
    """Largest kept set: without top-k, truncated sampling keeps no more of the most likely tokens. It returns the sets,
    and log-probabilities over them. 0: no bound, no sets (evaluation), log-probabilities over the full vocabulary."""
    seed: int = 0
    """Seed of the sampling noise (engine torch): a token's depends only on (seed, trajectory_id, position)."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the generation; the stop token itself is part of the output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSets:
    """Sets of tokens that truncated sampling kept, one per token; a token was drawn from its own set."""

    counts: Int32Array  # [tokens], size of each set; 0 where a token was drawn from the full vocabulary, or not drawn
    ids: Int32Array  # [sum of counts], the sets one after another, each ascending

    def __len__(self) -> int:
        return len(self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Contiguous tokens of one policy version or of the environment."""

    token_ids: Int32Array  # [tokens]
    behavior_logprobs: Float32Array | None  # [tokens]; log_softmax(z/T) of the sampled token; None for environment
    policy_version: int
    kv_min_version: int
    """Oldest policy version whose KV cache was used; equals ``policy_version`` in a pure segment."""
    source: SegmentSource = SegmentSource.POLICY
    temperature: float = 1.0
    kept_sets: KeptSets | None = None
    """Sets over which the log-probabilities are normalised; None for the full vocabulary."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def pure(self) -> bool:
        """True if exactly one policy version, with its own KV cache, sampled the tokens."""
        return self.source is SegmentSource.POLICY and self.kv_min_version == self.policy_version


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCall:
    """One request to continue a context."""

    trajectory_id: str
    context_ids: Int32Array  # [context_tokens], prompt plus tokens kept so far
    prompt_token_count: int
    """Length of the prompt inside ``context_ids``; the position of a token is counted from its end."""
    max_new_token_count: int
    sampling: SamplingParams
    chunk_token_count: int
    """Most tokens of a chunk."""
    group_id: str = ""
    unacknowledged_token_limit: int = 0
    """Most tokens sampled beyond the ones acknowledged by the caller; 0 for no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionNeed:
    """Policy versions that may serve a generation call."""

    min_version: int = 0
    """Oldest policy version that may serve the call; not older than the newest segment."""
    pinned_version: int | None = None
    """Only version that may serve the call (evaluation); None for any version from ``min_version`` on."""

    def allows(self, policy_version: int) -> bool:
        """Tell whether this version may serve the call."""
        return policy_version >= self.min_version and self.pinned_version in (None, policy_version)


ANY_VERSION = VersionNeed()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Contiguous tokens of one policy version; the last chunk of a call carries the finish reason."""

    token_ids: Int32Array  # [tokens]; may be empty on the last chunk, and while a call has no token to send
    behavior_logprobs: Float32Array  # [tokens], log_softmax(z/T) over the kept set, else the vocabulary (raw at T=0)
    policy_version: int
    kv_min_version: int
    finish_reason: FinishReason | None = None
    cached_token_count: int = 0
    kept_sets: KeptSets | None = None
    """Sets over which the log-probabilities are normalised, of a call that asks for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Prompt of a group and the input of its verifier."""

    prompt_id: str
    token_ids: Int32Array  # [prompt_tokens]
    verifier: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Input of the verifier: the reference answer, the tests, the puzzle (JSON values only)."""
    domain: str = ""
    """Domain of the prompt; empty without domains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnReturn:
    """Return of one turn of the policy."""

    end: int
    """Tokens of the trajectory that a policy wrote, up to the end of the turn."""
    value: float
    """Sum of the rewards from this turn on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardOutcome:
    """Typed result of scoring one trajectory; a time-out is never a silent 0."""

    kind: OutcomeKind
    value: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    message: str = ""
    turns: tuple[TurnReturn, ...] = ()
    """Returns of the turns in order (credit by turn); empty for one return of the whole trajectory."""
    shared_by: str = ""
    """Session whose agents share the reward (shared credit)."""

    @property
    def verdict(self) -> float | None:
        """Value of the verifier; None without one."""
        return self.value if self.kind is OutcomeKind.SCORED else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherColumn:
    """Log-probabilities of a teacher for the tokens of one response, at the softmax temperature of the run."""

    teacher: str
    """Name of the teacher in the run file."""
    manifest_digest: str
    """sha256 (hex) of the weights, tokenizer and settings of its model."""
    logprobs: Float32Array  # [response_tokens], log_softmax(z/T), environment tokens too
    top_ids: Int32Array | None = None  # [response_tokens, top_k], most likely first; None without top_k
    top_logprobs: Float32Array | None = None  # [response_tokens, top_k], log_softmax(z/T)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """Prompt, segments, finish reason and reward of one rollout."""

    trajectory_id: str
    group_id: str
    member_index: int
    prompt: Prompt
    segments: tuple[Segment, ...] = ()
    finish_reason: FinishReason | None = None
    outcome: RewardOutcome | None = None
    shaped_reward: float = 0.0
    """Reward after shaping (for example the overlong penalty); advantages are computed from it."""
    birth_version: int = 0
    """Newest policy version when the trajectory was first leased."""
    traceparent: str = ""
    cut_token_count: int = 0
    """Sampled tokens after the end that the group shaper chose; the segments end there."""
    teacher: TeacherColumn | None = None
    """Scores of all response tokens under the teacher of the prompt's domain; None in a run without teachers."""

    @property
    def response_token_count(self) -> int:
        """Number of tokens after the prompt, environment tokens included."""
        return sum(len(s) for s in self.segments)

    @property
    def response_ids(self) -> Int32Array:
        """All tokens after the prompt, int32 [response_tokens]."""
        if not self.segments:
            return np.empty(0, np.int32)
        return np.concatenate([s.token_ids for s in self.segments]).astype(np.int32, copy=False)

    @property
    def policy_versions(self) -> tuple[int, ...]:
        """Distinct policy versions that sampled tokens, ascending."""
        return tuple(sorted({s.policy_version for s in self.segments if s.source is SegmentSource.POLICY}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Scored trajectories of one prompt, as read by the trainer."""

    group_id: str
    admission_index: int
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Ordered groups of one train step; batch s turns train_step s-1 into s."""

    train_step: int
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRecord:
    """Published policy as announced in Redis; the manifest at ``path`` contains the rest."""

    policy_version: int
    """Number that identifies the weights; never reused; 0 is the initial policy."""
    train_step: int
    """Number of batches the weights were trained on."""
    path: str
    """Checkpoint folder, relative to the checkpoint store's root."""
    manifest_digest: str
    """sha256 (hex) of the manifest file."""

    @property
    def rollback_count(self) -> int:
        """Rollbacks of the run before this policy: the folder name ends with ``r<count>`` after the first one."""
        return rollbacks_of(self.path)


def rollbacks_of(path: str) -> int:
    """Return the rollbacks before a policy, which the name of its folder ends with."""
    mark = re.search(r"r(\d+)$", path)
    return int(mark[1]) if mark else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorWork:
    """Work of a generator since its process started; every number only increases."""

    prefill_tokens: int = 0
    """Context tokens computed."""
    reprefill_tokens: int = 0
    """Context tokens computed again although they were sampled before."""
    running_slot_seconds: float = 0.0
    """Integral of running calls over the time in prefill and decode."""
    slot_seconds: float = 0.0
    """Integral of slots over the time in service."""
    generated_tokens: int = 0
    """Tokens sampled for any purpose."""
    speculation: Mapping[str, int] = field(default_factory=dict)
    """Counters of speculative decoding by name; empty while it is off. ``steps N`` and ``tokens N`` count the steps of
    calls, and their tokens, while N calls ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorRecord:
    """Registration of a generator in Redis, renewed with every heartbeat."""

    instance_id: str
    """Random id, new at every start: addresses are reused, instance ids are not."""
    address: str
    policy_version: int
    running_count: int
    waiting_count: int
    slot_count: int
    kv_token_capacity: int
    """Capacity of the key-value cache in tokens."""
    serving: bool
    """False while the generator loads its first policy, drains, or is out of service."""
    reason: str = ""
    """Reason that the generator does not serve; empty while it serves."""
    loading_version: int | None = None
    """Version being verified and loaded; its checkpoint must not be deleted."""
    work: GeneratorWork = GeneratorWork()
    """Work counters, for the reports of train steps."""
    refused_version: int | None = None
    """Last refused version, until the generator serves that version or a newer one."""
    refused_count: int = 0
    """Versions refused in a row, up to ``refused_version``; 0 while the generator retries that version."""
    refused_reason: str = ""
    """Reason for the refusal of ``refused_version``."""
    kv_tokens_used: int = 0
    """Tokens in the key-value cache; with SGLang the contexts of its running calls, each counted in full."""
    draft_bytes: int = 0
    """Memory of the drafts."""
    preemption_total: int = 0
    """Calls that lost their cache because it was full, since the process started."""
