"""What the REST API answers. Times are Unix seconds, durations seconds, sizes bytes; null means not known.

Identifiers and versions are those of the run: a policy version is an integer, a trajectory id is
``<group>.<member>``.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

RunState = Literal["starting", "running", "paused", "recovering", "complete", "failed", "unreachable"]
"""starting: no policy yet; paused: by a person or by the schedule (``waiting_for`` says which); recovering: Redis came
back as an earlier state; unreachable: Redis does not answer, and the numbers are the last ones seen."""
ListState = Literal["pending", "leased", "partial", "finished", "scored", "unscorable", "dead"]
"""States of trajectories that have a record in the queue."""


class Model(BaseModel):
    """Closed answers whose docstrings become the OpenAPI text."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ErrorBody(Model):
    """Every answer with a status of 400 or more."""

    error: str
    """What is wrong, in words."""
    field: str | None = None
    """Parameter or body field that is wrong."""
    hint: str | None = None
    """What to do about it."""


class About(Model):
    """What a client needs to know before it draws anything."""

    run: str
    """Name of the run."""
    version: str
    """Version of rollmesh."""
    train_steps: int
    """Train steps of the whole run."""
    group_size: int
    """Trajectories of a group."""
    groups_per_batch: int
    """Groups of a batch."""
    max_staleness: int
    """Bound on staleness, in train steps."""
    text: bool
    """Whether token ids come with their text (the model's tokenizer can be read here)."""
    token_for_reads: bool
    """Whether every call needs the token, not only actions."""
    sample_seconds: float
    """Time between two looks at the mesh."""


class GeneratorView(Model):
    """One living generator, as of its last heartbeat."""

    instance_id: str
    """New at every start."""
    address: str
    """host:port of its gRPC service."""
    policy_version: int
    """Version that it serves; -1 before the first."""
    versions_behind: int
    """Announced versions newer than the one it serves."""
    serving: bool
    """Whether it takes calls."""
    reason: str
    """Why it does not serve."""
    running: int
    """Calls in its slots."""
    waiting: int
    """Calls that wait for a slot."""
    slots: int
    """Most calls at once."""
    kv_token_capacity: int
    """Tokens of its KV cache."""


class StalenessBin(Model):
    """One bar of a staleness histogram."""

    staleness: int
    """Train steps."""
    count: int
    """Groups (queue) or trajectories (trained)."""


class Staleness(Model):
    """How old the tokens are that wait and that were trained."""

    bound: int
    """Largest staleness allowed, in train steps."""
    queue: list[StalenessBin]
    """Open and ready groups that have tokens, by what their staleness would be if they were trained next."""
    trained: list[StalenessBin]
    """Trajectories of the newest trained batch; empty where the trainer's reports cannot be read."""


class Drop(Model):
    """Groups that left the queue untrained."""

    reason: str
    """stale, straggler_timeout, run_complete, rolled_back, too_few_scored, filtered_all_right, filtered_all_wrong."""
    groups: int
    """Groups."""
    tokens: int
    """Tokens that had been saved in them."""


class EvaluationPoint(Model):
    """One finished evaluation."""

    policy_version: int
    """Version evaluated."""
    mean: float
    """Mean score."""
    standard_error: float
    """Standard error of the mean."""
    sample_count: int
    """Scores behind the mean."""
    time: float | None
    """When it finished."""


class Memory(Model):
    """Memory of the queue's Redis."""

    used_bytes: int
    """Memory used."""
    max_bytes: int
    """Limit; 0 is none."""
    ratio: float
    """Used, plus what unfinished trajectories may still write, over the limit; 0 without a limit."""


class Rates(Model):
    """Over about the last 10 seconds."""

    saved_tokens_per_second: float
    """Tokens that reached the queue."""
    finished_per_second: float
    """Trajectories that ended."""
    trained_groups_per_second: float
    """Groups consumed by the trainer."""


class StepReport(Model):
    """The trainer's report on its newest step; fields it did not report are null."""

    train_step: int
    """Train step."""
    time: float
    """When it ended."""
    reward_mean: float | None = None
    """Mean shaped reward of the batch."""
    response_length_mean: float | None = None
    """Mean tokens of a response."""
    staleness_mean: float | None = None
    """Mean staleness of the batch's trajectories, in train steps."""
    off_policy_token_share: float | None = None
    """Share of tokens with staleness above 0."""
    seconds: float | None = None
    """Wall time of the step's phases together."""
    wait_seconds: float | None = None
    """Time the trainer waited for the batch."""


class ServiceScale(Model):
    """Processes of one service on this machine."""

    service: str
    """generator, reward or rollout."""
    running: int
    """Processes that have published where they listen."""
    requested: int | None
    """Replicas a person asked for; null when nobody did."""


class Overview(Model):
    """The whole run at one moment."""

    run: str
    """Name of the run."""
    time: float
    """When the mesh was looked at."""
    age_seconds: float
    """Time since then: grows while Redis is away."""
    state: RunState
    """What the run is doing."""
    waiting_for: str
    """What the next batch waits for, or why the run stands still; empty when nothing holds it up."""
    paused_by_person: bool
    """Whether a person paused the run; a schedule may pause it, too."""
    train_step: int
    """Batches trained on."""
    train_steps: int
    """Batches of the whole run."""
    cut_step: int
    """Batches cut."""
    newest_version: int
    """Newest announced policy version; -1 before the first."""
    newest_train_step: int
    """Its train step."""
    pinned_version: int | None
    """Version that generators are held at."""
    rollback_to: int | None
    """Version that a pending rollback goes back to."""
    pool_size: int
    """Most trajectories in flight."""
    trajectories: dict[str, int]
    """Trajectories by state: pending, partial, leased, finished, scored, unscorable, dead."""
    groups: dict[str, int]
    """Groups by state: open, ready, cut."""
    staleness: Staleness
    """Staleness histograms."""
    drops: list[Drop]
    """Dropped groups by reason."""
    generators: list[GeneratorView]
    """Living generators, those that serve first; at most 256."""
    generator_count: int
    """All living generators."""
    evaluations: list[EvaluationPoint]
    """Finished evaluations by version, the newest 64."""
    memory: Memory
    """Memory of the queue."""
    rates: Rates
    """Throughput."""
    report: StepReport | None
    """Newest train step; null where the trainer's reports cannot be read."""
    totals: dict[str, int]
    """Since the run began: admitted_total, consumed_total, finished_total, saved_tokens_total, ..."""
    workers: int
    """Living rollout workers."""
    dead_letters: int
    """Trajectories that gave up."""
    services: list[ServiceScale]
    """Local processes, by service; empty where the run folder is not on this machine."""


class VersionInterval(Model):
    """Tokens of one policy version within a rollout, as the gateway saw them arrive."""

    policy_version: int
    """Version that wrote them."""
    start: float
    """When its first tokens were expected: the lease, or the end of the interval before."""
    end: float
    """When its newest tokens were seen."""
    tokens: int
    """Tokens saved under it."""


class RolloutSpan(Model):
    """One rollout on the timeline. Times are those of the gateway's looks, so about a second apart."""

    id: str
    """Trajectory id."""
    start: float
    """First lease, or the first look that found it leased."""
    end: float | None
    """First look that found it at rest; null while it is in flight."""
    state: str
    """State at the newest look; ``gone`` once its group has left the queue."""
    worker: str
    """Rollout worker that holds it, or held it last."""
    generator: str | None
    """Generator that wrote its newest tokens; null when the worker does not report it."""
    birth_version: int
    """Newest version when it was first leased."""
    tokens: int
    """Tokens saved so far."""
    intervals: list[VersionInterval]
    """By time."""


class Timeline(Model):
    """Rollouts in flight now or during the last ``window_seconds``, oldest start first."""

    time: float
    """When the rollouts were looked at."""
    window_seconds: float
    """Ended rollouts stay so long."""
    in_flight: int
    """All trajectories in flight."""
    left_out: int
    """Those of them that are not listed, because the list is full."""
    rollouts: list[RolloutSpan]
    """Spans."""


class TimelineDelta(Model):
    """What one look changed: replace the spans with the same id, and drop the removed ones."""

    time: float
    """When the rollouts were looked at."""
    in_flight: int
    """All trajectories in flight."""
    left_out: int
    """Those of them that are not listed."""
    changed: list[RolloutSpan]
    """New and changed spans, whole. A span in flight that is not named goes on unchanged."""
    removed: list[str]
    """Ids that have left the window."""


class SnapshotEvent(Model):
    """Data of a ``snapshot`` event: everything; the first event, and after a client has missed too many."""

    overview: Overview
    """The run."""
    timeline: Timeline
    """All spans."""


class TickEvent(Model):
    """Data of a ``tick`` event: one look later."""

    overview: Overview
    """The run."""
    timeline: TimelineDelta
    """What changed."""


class Series(Model):
    """One curve; the lists have the same length, and x ascends."""

    name: str
    """Name, as asked for."""
    unit: str
    """tokens, train steps, nats, ratio, seconds, tokens/s, ..."""
    axis: Literal["train_step", "policy_version", "time"]
    """What x counts."""
    x: list[float]
    """Middle of each point's range."""
    mean: list[float]
    """Mean over the range."""
    low: list[float]
    """Smallest value in the range; the mean minus a standard error for evaluations."""
    high: list[float]
    """Largest value in the range; the mean plus a standard error for evaluations."""


class SeriesAnswer(Model):
    """Curves, thinned out to the asked number of points."""

    available: list[str]
    """Every name that can be asked for."""
    series: list[Series]
    """Those asked for, in that order; an empty curve when nothing has been reported yet."""


class TrajectorySummary(Model):
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


class TrajectoryPage(Model):
    """One page; it may hold fewer than ``limit`` and still not be the last one."""

    items: list[TrajectorySummary]
    """Trajectories, oldest group first."""
    next_cursor: str | None
    """Pass it as ``cursor`` for the next page; null on the last one."""


class TokenRun(Model):
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


class Outcome(Model):
    """What happened when the answer was scored."""

    kind: Literal["scored", "timed_out", "verifier_error"]
    """Only scored carries a value."""
    value: float
    """Value before shaping."""
    parts: dict[str, float]
    """Its parts, by name."""
    message: str
    """What the verifier said."""


class TrajectoryDetail(Model):
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


class PolicyView(Model):
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
    evaluation: EvaluationPoint | None
    """Its evaluation."""


class PolicyList(Model):
    """Announced policies, newest first."""

    policies: list[PolicyView]
    """At most as many as asked for."""
    total: int
    """All of them."""


class GeneratorList(Model):
    """Living generators."""

    generators: list[GeneratorView]
    """By address."""


class DeadLetterView(Model):
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


class DeadLetterList(Model):
    """Dead letters, oldest first."""

    dead_letters: list[DeadLetterView]
    """At most as many as asked for."""
    total: int
    """All of them; Redis keeps the newest 1000."""


class Done(Model):
    """An action was taken; repeating it changes nothing more."""

    done: str
    """What was done, in words."""
    group_id: str | None = None
    """Group that replays a dead letter."""
    request_id: str | None = None
    """Id of a rollback request."""


class ScaleRequest(Model):
    """How many processes of a service the launcher should keep."""

    service: Literal["generator", "reward", "rollout"]
    """Service to scale."""
    replicas: int | None = Field(ge=0, le=256)
    """Processes to keep; a surplus one is drained, and loses nothing. null: as the run file has it."""
