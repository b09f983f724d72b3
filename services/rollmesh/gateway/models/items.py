"""Single objects of a run and the actions on them: trajectories, batches, policies, dead letters, processes."""

from typing import Any, Literal

from pydantic import Field

from rollmesh.config.replica_bounds import MOST_REPLICAS
from rollmesh.gateway.models.live import EvaluationView, GeneratorView
from rollmesh.gateway.models.overview import ApiModel

ListState = Literal["pending", "leased", "partial", "resting", "finished", "scored", "unscorable", "dead", "surplus"]
"""States of trajectories that have a record in the queue."""


QueueOrder = Literal["queue", "reward", "tokens"]
"""Order of the rows of the queue; ``queue`` is oldest group first."""


class TrajectoryView(ApiModel):
    """What every view of a trajectory has."""

    id: str
    """Trajectory id."""
    group_id: str
    """Id of its group."""
    finish_reason: str | None
    """Reason for its end."""


class TrajectorySummary(TrajectoryView):
    """One row of the list."""

    state: str
    """State of the trajectory."""
    tokens: int
    """Tokens saved."""
    attempts: int
    """Leases without progress, including the current one."""
    birth_version: int | None
    """Newest version at its first lease."""
    newest_version: int | None
    """Version that wrote its newest tokens."""
    reward: float | None
    """Shaped reward."""
    train_step: int | None = None
    """Train step of its batch."""
    preview: str | None = None
    """Beginning and end of the saved response as text, shortened; null unless requested."""


class TrajectoryPage(ApiModel):
    """One page; a page may hold fewer than ``limit`` items although another page follows."""

    items: list[TrajectorySummary]
    """Trajectories in the requested order."""
    next_cursor: str | None
    """Value of ``cursor`` for the next page; null on the last one."""


class TokenRun(ApiModel):
    """Contiguous tokens from one source. The lists have one entry per token."""

    source: Literal["prompt", "policy", "environment"]
    """Source of the tokens; only tokens of the policy have log-probabilities and are trained on."""
    policy_version: int | None
    """Version that sampled them; null for prompt and environment."""
    kv_min_version: int | None
    """Oldest version whose cache they attended to; below ``policy_version`` after a weight swap under keep_kv."""
    position: int
    """Position of the first token, counted from the start of the response (negative in the prompt)."""
    token_ids: list[int]
    """Token ids."""
    texts: list[str] | None
    """Text of each token (empty if a later token completes the character); null without a tokenizer."""
    logprobs: list[float | None] | None
    """Behavior log-probabilities in nats, at the sampling temperature; null for prompt and environment."""
    teacher_logprobs: list[float | None] | None
    """Log-probabilities under the teacher, in nats, at the same temperature; null without a teacher."""
    kept_counts: list[int] | None
    """Size of the set that each token was drawn from; null where it was drawn from the full vocabulary."""
    temperature: float | None
    """Softmax temperature."""


class Outcome(ApiModel):
    """Result of scoring the answer."""

    kind: Literal["scored", "timed_out", "verifier_error"]
    """Kind of the result; only scored carries a value."""
    value: float
    """Value before shaping."""
    parts: dict[str, float]
    """Parts of the value, by name."""
    message: str
    """Message of the verifier."""


class TrajectoryDetail(TrajectoryView):
    """One trajectory with its tokens."""

    members: list[str]
    """All trajectories of the group."""
    member_rewards: tuple[float | None, ...] = ()
    """Shaped rewards of ``members``, in their order; null until a member is scored, empty if unknown."""
    state: str
    """State in the queue; ``consumed`` once it has been trained on."""
    found_in: Literal["queue", "batch", "dead_letter"]
    """Place where its tokens were read."""
    train_step: int | None
    """Train step of its batch."""
    worker: str
    """Worker that leases it."""
    history: list[str]
    """Restarts, rests and cut-off while it is in the queue, one sentence each."""
    birth_version: int
    """Newest version at its first lease."""
    policy_versions: list[int]
    """Versions that wrote tokens, ascending."""
    outcome: Outcome | None
    """Score; null until it is scored."""
    shaped_reward: float | None
    """Reward that advantages are computed from; null until it is scored."""
    teacher: str
    """Teacher that scored the tokens, with the beginning of its manifest digest; empty without one."""
    verifier: str
    """Verifier of the prompt."""
    prompt_metadata: dict[str, Any]
    """Prompt metadata, which the verifier receives with the answer."""
    prompt_tokens: int
    """Tokens of the prompt."""
    response_tokens: int
    """All tokens after the prompt."""
    first_token: int
    """Position of the first token listed in ``runs``, counted from the start of the prompt."""
    next_token: int | None
    """Value of ``first_token`` for the next page; null on the last one."""
    runs: list[TokenRun]
    """Prompt and response tokens, in order."""
    traceparent: str
    """W3C trace context of the trajectory."""


class PolicyView(ApiModel):
    """One announced policy."""

    policy_version: int
    """Policy version."""
    train_step: int
    """Number of batches it was trained on."""
    newest: bool
    """True for the newest policy."""
    pinned: bool
    """True if generators are pinned to it."""
    generators: int
    """Live generators that serve it."""
    evaluation: EvaluationView | None
    """Evaluation of the policy."""


class PolicyList(ApiModel):
    """Announced policies, newest first."""

    policies: list[PolicyView]
    """Policies, limited by the request."""
    total: int
    """Number of all announced policies."""


class GeneratorList(ApiModel):
    """Live generators."""

    generators: list[GeneratorView]
    """Generators by address."""


class DeadLetterView(ApiModel):
    """A failed trajectory."""

    trajectory_id: str
    """Id of the trajectory, whose page shows its tokens."""
    group_id: str
    """Group that it belonged to."""
    reason: str
    """Reason for the failure."""
    time: float
    """Time of the failure."""
    attempts: int
    """Leases without progress."""
    tokens: int
    """Tokens saved."""
    replayed_as: str
    """Group that replays it; empty without a replay."""


class DeadLetterList(ApiModel):
    """Dead letters, newest first."""

    dead_letters: list[DeadLetterView]
    """Dead letters, limited by the request."""
    total: int
    """Number of all dead letters; Redis keeps the newest 1000."""


class Done(ApiModel):
    """Result of an action; repeating the action changes nothing more."""

    done: str
    """Description of the result."""
    group_id: str | None = None
    """Group that replays a dead letter."""
    request_id: str | None = None
    """Id of a rollback request."""


class ScaleRequest(ApiModel):
    """Number of processes of a service that the launcher should keep."""

    service: Literal["generator", "reward", "rollout"]
    """Service to scale."""
    replicas: int | None = Field(ge=0, le=MOST_REPLICAS)
    """Processes to keep; a surplus process is drained and loses no work. null restores the value of the run file."""
    force: bool = False
    """Accept more processes than the cores and the memory of the machine allow."""


BatchOrder = Literal["batch", "reward", "tokens"]
"""Order of the rows of a batch; ``batch`` is the order of training."""


class BatchTrajectory(TrajectoryView):
    """One trajectory of a batch file."""

    reward: float | None
    """Shaped reward; null without a score."""
    tokens: int
    """Tokens of the response."""
    policy_versions: list[int]
    """Versions that wrote tokens, ascending."""
    preview: str
    """Beginning and end of the response as text, shortened; token ids without a tokenizer."""


class BatchPage(ApiModel):
    """Some rows of one batch file."""

    train_step: int
    """Train step of the batch."""
    items: list[BatchTrajectory]
    """Trajectories in the requested order."""
    first: int
    """Position of the first row."""
    total: int
    """Number of trajectories in the batch."""


class BatchList(ApiModel):
    """Train steps whose batch file can be read."""

    train_steps: list[int]
    """Train steps, newest first."""


class ProcessView(ApiModel):
    """One process of the launcher, or one that has ended and has left a log."""

    name: str
    """Service and index, such as ``trainer-0``; ``launcher-0`` is the launcher, ``redis`` its Redis."""
    pid: int | None
    """Process id; null if it does not run on this machine."""
    memory_bytes: int | None
    """Resident memory of the process and its children."""
    cpu_share: float | None
    """CPU seconds per second since the previous read, children included; null at the first read."""
    log_bytes: int | None
    """Size of its log; null without one."""


class ProcessList(ApiModel):
    """Processes of the run."""

    processes: list[ProcessView]
    """Processes by name; empty if the run folder is not on this machine."""


class LogTail(ApiModel):
    """End of the log of one process."""

    name: str
    """Service and index."""
    lines: list[str]
    """Last lines, oldest first."""
