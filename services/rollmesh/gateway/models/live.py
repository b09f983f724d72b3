"""Live state of the run: overview, timeline, events and curves."""

from typing import Literal

from pydantic import Field

from rollmesh.gateway.models.overview import ApiModel, RunResultView
from rollmesh.mesh import DropReason, WasteReason

RunState = Literal["starting", "running", "paused", "recovering", "complete", "failed", "stopped", "unreachable"]
"""starting: no policy yet; paused: ``paused_by`` names the reason; recovering: Redis was restored to an earlier state;
stopped: ended before its last train step (only where ``result`` is set); unreachable: Redis does not answer, and the
numbers are the last known ones."""

PausedBy = Literal["operator", "launcher", "schedule"]
"""operator: until resumed; launcher: during one of its evaluations; schedule: see ``waiting_for``."""


class GeneratorView(ApiModel):
    """One live generator, as of its last heartbeat."""

    instance_id: str
    """Id of the process, new at every start."""
    address: str
    """host:port of its gRPC service."""
    policy_version: int
    """Version that it serves; -1 before the first."""
    versions_behind: int
    """Announced versions newer than the one it serves."""
    serving: bool
    """True if it accepts calls."""
    reason: str
    """Reason for not serving."""
    running: int
    """Calls in its slots."""
    waiting: int
    """Calls that wait for a slot."""
    slots: int
    """Maximum number of calls in progress."""
    kv_token_capacity: int
    """Tokens of its KV cache."""
    kv_tokens_used: int = 0
    """Tokens in its KV cache."""
    preemptions: int = 0
    """Calls that lost their cache because it was full, since the process started."""


class StalenessBin(ApiModel):
    """One bar of a staleness histogram."""

    staleness: int
    """Train steps."""
    count: int
    """Groups (queue) or trajectories (trained)."""


class Staleness(ApiModel):
    """Staleness of waiting groups and of trained trajectories."""

    bound: int
    """Largest staleness allowed, in train steps."""
    queue: list[StalenessBin]
    """Open and ready groups with tokens, by the staleness they would have in the next batch."""
    trained: list[StalenessBin]
    """Trajectories of the newest trained batch, of an ended run those of all batches; empty if the trainer's reports
    cannot be read."""


class DropView(ApiModel):
    """Groups that left the queue untrained."""

    reason: str = Field(description=f"{', '.join(DropReason)}.")
    groups: int
    """Groups."""
    tokens: int
    """Tokens saved in these groups, except those of members that were already unscorable or dead."""


class WasteView(ApiModel):
    """Saved tokens that are never trained on although their group was not dropped."""

    reason: str = Field(description=f"{', '.join(WasteReason)}.")
    count: int
    """Members without a score, cut off or shortened; for restarted and set_aside the groups that began again."""
    tokens: int
    """Saved tokens of these."""


class DomainView(ApiModel):
    """Totals of one domain of the prompts."""

    domain: str
    """Name of the domain."""
    drawn: int
    """Groups admitted."""
    completed: int
    """Scored trajectories of ended groups."""
    solved: int
    """Those with a positive outcome of the verifier."""
    tokens: int
    """Tokens of the completed trajectories."""


class EvaluationView(ApiModel):
    """One finished evaluation."""

    policy_version: int
    """Version evaluated."""
    mean: float
    """Mean score."""
    standard_error: float | None
    """Standard error of the mean, over prompts; null for fewer than two prompts with a score."""
    sample_count: int
    """Number of scores in the mean."""
    time: float | None
    """End of the evaluation."""


class MemoryView(ApiModel):
    """Memory of the queue's Redis."""

    used_bytes: int = 0
    """Memory used."""
    max_bytes: int = 0
    """Memory limit; 0 means no limit."""
    ratio: float = 0.0
    """Memory used, plus the possible growth of unfinished trajectories, divided by the limit; 0 without a limit."""


class Rates(ApiModel):
    """Rates over about the last 10 seconds."""

    saved_tokens_per_second: float = 0.0
    """Tokens saved to the queue."""
    finished_per_second: float = 0.0
    """Trajectories that ended."""
    trained_groups_per_second: float = 0.0
    """Groups consumed by the trainer."""


class StepReportView(ApiModel):
    """The trainer's report on its newest step; missing fields are null."""

    train_step: int
    """Train step."""
    time: float
    """End of the step."""
    reward_mean: float | None = None
    """Mean shaped reward of the batch."""
    response_length_mean: float | None = None
    """Mean tokens of a response."""
    staleness_mean: float | None = None
    """Mean staleness of the batch's trajectories, in train steps."""
    off_policy_token_share: float | None = None
    """Share of tokens with staleness above 0."""
    seconds: float | None = None
    """Total wall time of the step's phases."""
    wait_seconds: float | None = None
    """Time the trainer waited for the batch."""


class ServiceScale(ApiModel):
    """Processes of one service on this machine."""

    service: str
    """generator, reward or rollout."""
    running: int
    """Processes with a published endpoint."""
    requested: int | None
    """Replicas requested by an operator; null without a request."""


class Overview(ApiModel):
    """The whole run at one moment."""

    run: str
    """Name of the run."""
    time: float
    """Time of the snapshot."""
    age_seconds: float = 0.0
    """Seconds since the snapshot; grows while Redis is unreachable."""
    state: RunState
    """State of the run."""
    waiting_for: str
    """Condition that the next batch waits for, or reason that the run has stopped; empty if nothing blocks it."""
    paused_by_person: bool = False
    """True if an operator paused the run."""
    paused_by: tuple[PausedBy, ...] = ()
    """Causes of the pause; empty while the run is not paused."""
    train_step: int
    """Batches trained on."""
    train_steps: int
    """Batches of the whole run."""
    cut_step: int
    """Batches cut."""
    newest_version: int
    """Newest announced policy version; -1 before the first."""
    newest_train_step: int
    """Train step of the newest version."""
    pinned_version: int | None = None
    """Version that generators are pinned to."""
    pinned_by: Literal["operator", "evaluation"] | None = None
    """Owner of the pin: an evaluation holds one generator, and releases it at its end; null without a pin."""
    rollback_to: int | None = None
    """Target version of a pending rollback."""
    pool_size: int
    """Maximum number of trajectories in progress."""
    trajectories: dict[str, int] = Field(default_factory=dict)
    """Trajectories by state: pending, partial, resting, leased, finished, scored, unscorable, dead, surplus."""
    groups: dict[str, int] = Field(default_factory=dict)
    """Groups by state: open, ready, cut, aside (waiting to begin again)."""
    staleness: Staleness
    """Staleness histograms."""
    drops: list[DropView]
    """Dropped groups by reason."""
    waste: tuple[WasteView, ...]
    """Other wasted tokens by reason."""
    domains: tuple[DomainView, ...] = ()
    """Domains of the prompts, those with the most groups first; at most 64, and none in a run without a sampler."""
    domain_count: int = 0
    """Number of all domains."""
    generators: list[GeneratorView] = Field(default_factory=list)
    """Live generators, serving ones first; at most 256."""
    generator_count: int = 0
    """Number of all live generators."""
    evaluations: list[EvaluationView]
    """Finished evaluations by version, the newest 64."""
    memory: MemoryView = MemoryView()
    """Memory of the queue."""
    rates: Rates = Rates()
    """Throughput."""
    report: StepReportView | None
    """Newest train step; null if the trainer's reports cannot be read."""
    totals: dict[str, int]
    """Counts since the start of the run: admitted_total, consumed_total, finished_total, saved_tokens_total, ..."""
    workers: int = 0
    """Live rollout workers."""
    dead_letters: int = 0
    """Number of dead letters."""
    services: list[ServiceScale] = Field(default_factory=list)
    """Local processes, by service; empty if the run folder is not on this machine."""
    elapsed_seconds: float | None = None
    """Seconds since the first record of the run, or from the first to the last one; null if unknown."""
    remaining_seconds: float | None = None
    """Estimate of the seconds to the last train step, from the pace of the newest steps; null if unknown."""
    result: RunResultView | None = None
    """Result of a run that has ended, read from its run folder; null for a live run."""


class VersionInterval(ApiModel):
    """Tokens of one policy version within a rollout, as observed by the gateway."""

    policy_version: int
    """Version that wrote them."""
    start: float
    """Start: the lease, or the end of the previous interval."""
    end: float
    """Time at which the newest tokens were observed."""
    tokens: int
    """Tokens saved under this version."""


class RolloutSpan(ApiModel):
    """One rollout on the timeline. Times are those of the gateway's polls, about one second apart."""

    id: str
    """Trajectory id."""
    start: float
    """First lease, or the first poll that found it leased."""
    end: float | None
    """First poll that found it without a lease; null while it is in progress."""
    state: str
    """State at the newest poll; ``gone`` once its group has left the queue."""
    worker: str
    """Rollout worker that leases it, or leased it last."""
    generator: str | None
    """Instance id of the generator that wrote its newest saved tokens; null before the first save."""
    birth_version: int
    """Newest version at its first lease."""
    tokens: int
    """Tokens saved so far."""
    intervals: list[VersionInterval]
    """Intervals by time."""


class TimelinePoll(ApiModel):
    """One poll of the rollouts in progress."""

    time: float
    """Time of the poll."""
    in_flight: int
    """Number of all trajectories in progress."""
    left_out: int
    """Number of trajectories in progress that do not fit in the list."""


class Timeline(TimelinePoll):
    """Rollouts in progress now or during the last ``window_seconds``, oldest start first."""

    window_seconds: float
    """Seconds that ended rollouts stay listed."""
    rollouts: list[RolloutSpan]
    """Rollouts."""


class TimelineDelta(TimelinePoll):
    """Changes of one poll: replace the spans with the same id, and drop the removed ones."""

    changed: list[RolloutSpan] = Field(default_factory=list)
    """New and changed spans, complete. Spans in progress that are not listed are unchanged."""
    removed: list[str] = Field(default_factory=list)
    """Ids that have left the window."""


class SnapshotEvent(ApiModel):
    """Data of a ``snapshot`` event: the complete state; sent first, and after a client has missed events."""

    overview: Overview
    """State of the run."""
    timeline: Timeline
    """All spans."""


class TickEvent(ApiModel):
    """Data of a ``tick`` event: the changes of one poll."""

    overview: Overview
    """State of the run."""
    timeline: TimelineDelta
    """Changes of the timeline."""


class Series(ApiModel):
    """One curve; the lists have the same length, and x ascends."""

    name: str
    """Name, as requested."""
    unit: str
    """tokens, train steps, nats, ratio, seconds, tokens/s, ..."""
    axis: Literal["train_step", "policy_version", "time"]
    """Meaning of x."""
    x: list[float]
    """Middle of each point's range."""
    times: tuple[float, ...] = ()
    """Time of each point of a step or a version; empty where x is the time."""
    mean: list[float]
    """Mean over the range."""
    low: list[float]
    """Smallest value in the range; the mean minus a standard error for evaluations."""
    high: list[float]
    """Largest value in the range; the mean plus a standard error for evaluations."""


class BesideCurves(ApiModel):
    """Curves of another run (``rollmesh view RUN --beside OTHER``)."""

    run: str
    """Name of the run, or its folder if both runs have one name."""
    begin_time: float | None
    """Time of the first record of the run; null if unknown."""
    series: list[Series]
    """The requested curves, in the same order."""


class SeriesAnswer(ApiModel):
    """Curves, thinned out to the requested number of points."""

    available: list[str]
    """All curve names."""
    series: list[Series]
    """Requested curves, in that order; a curve without reports is empty."""
    begin_time: float | None = None
    """Time of the first record of the run; null if unknown, and for a live run."""
    beside: tuple[BesideCurves, ...] = ()
    """The same curves of other runs."""
