"""A run as a whole: facts, errors, the result of one that has ended, its run file, the end of its event stream."""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class ApiModel(BaseModel):
    """Response model without extra fields; its docstrings become the OpenAPI text."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ErrorBody(ApiModel):
    """Body of every response with a status of 400 or more."""

    error: str
    """Error message."""
    field: str | None = None
    """Invalid parameter or body field."""
    hint: str | None = None
    """Remedy."""


class About(ApiModel):
    """Facts that a client needs before it draws anything."""

    run: str
    """Name of the run."""
    version: str
    """Version of rollmesh."""
    folder: str
    """Run folder, as the gateway's machine names it; ``rollmesh view`` opens it once the run has ended."""
    train_steps: int
    """Train steps of the whole run."""
    group_size: int
    """Trajectories of a group."""
    groups_per_batch: int
    """Groups of a batch."""
    max_staleness: int
    """Bound on staleness, in train steps."""
    text: bool
    """True if token ids come with their text (the gateway can read the model's tokenizer)."""
    token_for_reads: bool
    """True if every call requires the token, not only actions."""
    sample_seconds: float
    """Seconds between two polls of the mesh."""


class ResultLine(ApiModel):
    """One fact about an ended run."""

    name: str
    """Name: state, reward of the last step, audit, ..."""
    value: str
    """Value with its unit."""


class Remark(ApiModel):
    """One sentence about the run."""

    text: str
    """Sentence."""
    bad: bool
    """True for a problem."""


class ResultTable(ApiModel):
    """A table about the whole run; its cells are text."""

    name: Literal["evaluations", "audit", "versions"]
    """Subject."""
    heads: list[str]
    """Names of the columns."""
    rows: list[list[str]]
    """Cells by row."""
    note: str = ""
    """Explanation of the cells."""


class SampleView(ApiModel):
    """One sample completion, possibly shortened."""

    trajectory_id: str
    """Trajectory id."""
    train_step: int | None
    """Train step of its batch."""
    reward: float | None
    """Reward."""
    policy_versions: list[int]
    """Versions that wrote tokens."""
    prompt: str
    """Prompt."""
    completion: str
    """Response."""


class VersionCalls(ApiModel):
    """Running calls of one policy version over the moments of a history."""

    policy_version: int
    """Policy version."""
    first: int
    """Index of the first moment with a call."""
    calls: list[float]
    """Mean running calls from there to the last moment with a call."""


class MeshHistory(ApiModel):
    """The mesh over the whole run, as means over at most some hundred intervals of time."""

    time: list[float]
    """Moments, ascending."""
    slots: list[float]
    """Slots of serving generators."""
    running: list[VersionCalls]
    """Running calls by policy version, ascending."""
    trajectories: dict[str, list[float]]
    """Trajectories by state; states that never occur are left out."""
    groups: dict[str, list[float]]
    """Groups by state: open, ready."""


class RunResultView(ApiModel):
    """Result of a run that has ended, read from its run folder."""

    time: float | None
    """Time of the newest record of the run; null without any."""
    lines: list[ResultLine]
    """Facts: state, reward of the last step, score before and after, audit, ..."""
    report: bool
    """True if ``/report.html`` is served."""
    remarks: tuple[Remark, ...] = ()
    """Sentences about progress, score, staleness, drops and audit, the most important ones first."""
    missing: tuple[str, ...] = ()
    """Data that the run folder lacks."""
    tables: tuple[ResultTable, ...] = ()
    """Evaluations, checks of the audit, policy versions; a table without rows is left out."""
    samples: tuple[SampleView, ...] = ()
    """Sample completions, evenly spread over the run."""
    logs: tuple[ResultLine, ...] = ()
    """Log files of the run folder with their sizes; only in ``report.html``, which lies beside them."""
    history: MeshHistory | None = None
    """The mesh over the whole run; null without a timeline."""


class RunSettings(ApiModel):
    """Resolved run file without its secrets."""

    yaml: str
    """Text of the run file."""


class EndEvent(ApiModel):
    """Data of an ``end`` event: the last one, before the gateway shuts down."""

    time: float
    """Time of the shutdown."""
    by: Literal["launcher", "signal"]
    """launcher: the launcher that started this gateway stops the run; signal: only this gateway is stopped."""
