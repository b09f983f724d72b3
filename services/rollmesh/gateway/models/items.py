"""Single things of a run, and what is done to them: trajectories, policies, dead letters, actions."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rollmesh.gateway.models.api_model import ApiModel
from rollmesh.gateway.models.live import EvaluationView, GeneratorView

ListState = Literal["pending", "leased", "partial", "finished", "scored", "unscorable", "dead"]
"""States of trajectories that have a record in the queue."""


class TrajectorySummary(ApiModel):
    """One row of the list."""

    id: str
    """Trajectory id."""
    group_id: str
    """Its group."""
    state: str
    """Its state."""
    tokens: int
    """Tokens saved."""
    attempts: int
    """Leases without progress, the current one included."""
    birth_version: int | None
    """Newest version when it was first leased."""
    newest_version: int | None
    """Version that wrote its newest tokens."""
    finish_reason: str | None
    """Why it ended."""
    reward: float | None
    """Shaped reward."""
    train_step: int | None = None
    """Batch that it is in."""


class TrajectoryPage(ApiModel):
    """One page; it may hold fewer than ``limit`` and still not be the last one."""

    items: list[TrajectorySummary]
    """Trajectories, oldest group first."""
    next_cursor: str | None
    """Pass it as ``cursor`` for the next page; null on the last one."""


class TokenRun(ApiModel):
    """Contiguous tokens of one writer. The lists have one entry per token."""

    source: Literal["prompt", "policy", "environment"]
    """Who wrote them: only those of the policy have log-probabilities and are trained on."""
    policy_version: int | None
    """Version that sampled them; null for prompt and environment."""
    kv_min_version: int | None
    """Oldest version whose cache they attended to; below ``policy_version`` after a weight swap under keep_kv."""
    position: int
    """Position of the first one, counted from the start of the response (negative in the prompt)."""
    token_ids: list[int]
    """Token ids."""
    texts: list[str] | None
    """Text of each token (empty where a character is completed by a later one); null without a tokenizer."""
    logprobs: list[float | None] | None
    """Behavior log-probabilities in nats, at the temperature they were sampled with; null when there are none."""
    temperature: float | None
    """Softmax temperature."""


class Outcome(ApiModel):
    """What happened when the answer was scored."""

    kind: Literal["scored", "timed_out", "verifier_error"]
    """Only scored carries a value."""
    value: float
    """Value before shaping."""
    parts: dict[str, float]
    """Its parts, by name."""
    message: str
    """What the verifier said."""


class TrajectoryDetail(ApiModel):
    """One trajectory with its tokens."""

    id: str
    """Trajectory id."""
    group_id: str
    """Its group."""
    members: list[str]
    """All trajectories of the group."""
    state: str
    """State in the queue; ``consumed`` once it has been trained on."""
    found_in: Literal["queue", "batch", "dead_letter"]
    """Where its tokens were read."""
    train_step: int | None
    """Batch that it is in."""
    worker: str
    """Worker that holds it."""
    birth_version: int
    """Newest version when it was first leased."""
    policy_versions: list[int]
    """Versions that wrote tokens, ascending."""
    finish_reason: str | None
    """Why it ended."""
    outcome: Outcome | None
    """Score; null before it is scored."""
    shaped_reward: float | None
    """Reward that advantages are computed from; null before it is scored."""
    verifier: str
    """Verifier of the prompt."""
    prompt_metadata: dict[str, Any]
    """What the verifier is given beside the answer."""
    prompt_tokens: int
    """Tokens of the prompt."""
    response_tokens: int
    """Tokens after the prompt, all of them."""
    first_token: int
    """Position of the first token listed in ``runs``, counted from the start of the prompt."""
    next_token: int | None
    """Pass it as ``first_token`` for the rest; null when everything is listed."""
    runs: list[TokenRun]
    """Prompt and response tokens, in order."""
    traceparent: str
    """W3C trace context of the trajectory."""


class PolicyView(ApiModel):
    """One announced policy."""

    policy_version: int
    """Its name."""
    train_step: int
    """Batches it was trained on."""
    newest: bool
    """Whether it is the newest."""
    pinned: bool
    """Whether generators are held at it."""
    generators: int
    """Living generators that serve it."""
    evaluation: EvaluationView | None
    """Its evaluation."""


class PolicyList(ApiModel):
    """Announced policies, newest first."""

    policies: list[PolicyView]
    """At most as many as asked for."""
    total: int
    """All of them."""


class GeneratorList(ApiModel):
    """Living generators."""

    generators: list[GeneratorView]
    """By address."""


class DeadLetterView(ApiModel):
    """A trajectory that gave up."""

    trajectory_id: str
    """Its id; the trajectory's own page shows its tokens."""
    group_id: str
    """Group that it was in."""
    reason: str
    """Why it gave up."""
    time: float
    """When."""
    attempts: int
    """Leases without progress."""
    tokens: int
    """Tokens saved."""
    replayed_as: str
    """Group that replays it; empty when nobody asked."""


class DeadLetterList(ApiModel):
    """Dead letters, newest first."""

    dead_letters: list[DeadLetterView]
    """At most as many as asked for."""
    total: int
    """All of them; Redis keeps the newest 1000."""


class Done(ApiModel):
    """An action was taken; repeating it changes nothing more."""

    done: str
    """What was done, in words."""
    group_id: str | None = None
    """Group that replays a dead letter."""
    request_id: str | None = None
    """Id of a rollback request."""


class ScaleRequest(ApiModel):
    """How many processes of a service the launcher should keep."""

    service: Literal["generator", "reward", "rollout"]
    """Service to scale."""
    replicas: int | None = Field(ge=0, le=256)
    """Processes to keep; a surplus one is drained, and loses nothing. null: as the run file has it."""
    force: bool = False
    """Ask even for more processes than the cores and the memory of the machine can take."""
