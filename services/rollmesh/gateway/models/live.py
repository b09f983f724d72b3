"""The run as it goes on: overview, timeline, events, curves."""

from __future__ import annotations

from typing import Literal

from rollmesh.gateway.models.api_model import ApiModel

RunState = Literal["starting", "running", "paused", "recovering", "complete", "failed", "unreachable"]
"""starting: no policy yet; paused: ``paused_by`` names who did; recovering: Redis came back as an earlier state;
unreachable: Redis does not answer, and the numbers are the last ones seen."""

PausedBy = Literal["operator", "launcher", "schedule"]
"""operator: until resumed; launcher: for an evaluation of its own; schedule: ``waiting_for`` says for what."""


class GeneratorView(ApiModel):
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


class StalenessBin(ApiModel):
    """One bar of a staleness histogram."""

    staleness: int
    """Train steps."""
    count: int
    """Groups (queue) or trajectories (trained)."""


class Staleness(ApiModel):
    """How old the tokens are that wait and that were trained."""

    bound: int
    """Largest staleness allowed, in train steps."""
    queue: list[StalenessBin]
    """Open and ready groups that have tokens, by what their staleness would be if they were trained next."""
    trained: list[StalenessBin]
    """Trajectories of the newest trained batch; empty where the trainer's reports cannot be read."""


class DropView(ApiModel):
    """Groups that left the queue untrained."""

    reason: str
    """stale, straggler_timeout, run_complete, rolled_back, too_few_scored, filtered_all_right, filtered_all_wrong."""
    groups: int
    """Groups."""
    tokens: int
    """Tokens that had been saved in them, without those of members that had become unscorable or dead before."""


class EvaluationView(ApiModel):
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


class MemoryView(ApiModel):
    """Memory of the queue's Redis."""

    used_bytes: int
    """Memory used."""
    max_bytes: int
    """Limit; 0 is none."""
    ratio: float
    """Used, plus what unfinished trajectories may still write, over the limit; 0 without a limit."""


class Rates(ApiModel):
    """Over about the last 10 seconds."""

    saved_tokens_per_second: float
    """Tokens that reached the queue."""
    finished_per_second: float
    """Trajectories that ended."""
    trained_groups_per_second: float
    """Groups consumed by the trainer."""


class StepReportView(ApiModel):
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


class ServiceScale(ApiModel):
    """Processes of one service on this machine."""

    service: str
    """generator, reward or rollout."""
    running: int
    """Processes that have published where they listen."""
    requested: int | None
    """Replicas a person asked for; null when nobody did."""


class Overview(ApiModel):
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
    """Whether an operator paused the run."""
    paused_by: tuple[PausedBy, ...] = ()
    """Who paused the run; empty while it is not paused."""
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
    drops: list[DropView]
    """Dropped groups by reason."""
    generators: list[GeneratorView]
    """Living generators, those that serve first; at most 256."""
    generator_count: int
    """All living generators."""
    evaluations: list[EvaluationView]
    """Finished evaluations by version, the newest 64."""
    memory: MemoryView
    """Memory of the queue."""
    rates: Rates
    """Throughput."""
    report: StepReportView | None
    """Newest train step; null where the trainer's reports cannot be read."""
    totals: dict[str, int]
    """Since the run began: admitted_total, consumed_total, finished_total, saved_tokens_total, ..."""
    workers: int
    """Living rollout workers."""
    dead_letters: int
    """Trajectories that gave up."""
    services: list[ServiceScale]
    """Local processes, by service; empty where the run folder is not on this machine."""


class VersionInterval(ApiModel):
    """Tokens of one policy version within a rollout, as the gateway saw them arrive."""

    policy_version: int
    """Version that wrote them."""
    start: float
    """When its first tokens were expected: the lease, or the end of the interval before."""
    end: float
    """When its newest tokens were seen."""
    tokens: int
    """Tokens saved under it."""


class RolloutSpan(ApiModel):
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
    """Instance id of the generator that wrote its newest saved tokens; null before the first save."""
    birth_version: int
    """Newest version when it was first leased."""
    tokens: int
    """Tokens saved so far."""
    intervals: list[VersionInterval]
    """By time."""


class Timeline(ApiModel):
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


class TimelineDelta(ApiModel):
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


class SnapshotEvent(ApiModel):
    """Data of a ``snapshot`` event: everything; the first event, and after a client has missed too many."""

    overview: Overview
    """The run."""
    timeline: Timeline
    """All spans."""


class TickEvent(ApiModel):
    """Data of a ``tick`` event: one look later."""

    overview: Overview
    """The run."""
    timeline: TimelineDelta
    """What changed."""


class Series(ApiModel):
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


class SeriesAnswer(ApiModel):
    """Curves, thinned out to the asked number of points."""

    available: list[str]
    """Every name that can be asked for."""
    series: list[Series]
    """Those asked for, in that order; an empty curve when nothing has been reported yet."""
