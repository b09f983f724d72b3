"""Reader of a run folder that may be partial: of a run in progress, a killed run, or a run that failed early.

config.yaml         the resolved run file
metrics.jsonl       one object per train step
timeline.jsonl      one object per second of the mesh
evaluations.jsonl   one object per evaluated policy version
samples.jsonl       sample completions
audit.json          the last audit
failure.json        reason of a failed run
logs/  checkpoints/
"""

import contextlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from rollmesh.config.load import load_run_config
from rollmesh.config.run import RunConfig
from rollmesh.config.store import CheckpointConfig
from rollmesh.errors import ConfigError, DataError
from rollmesh.file_writes import writing
from rollmesh.report.console import domain_scores, fewer_prompts, plus_minus
from rollmesh.scheduling import OnStale, Schedule
from rollmesh.store.queue_types import EXISTING_PROMPTS, REQUESTED_PROMPTS, DomainScore

Record = Mapping[str, Any]
FAILURE_FILE = "failure.json"
REPORT_FILE = "report.html"
_LOCATION_VARIABLES = tuple(f"ROLLMESH_CHECKPOINTS__{name}" for name in ("FOLDER", "CACHE_FOLDER", "OBJECT_STORE"))


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonLines:
    """Records of one JSON-lines file."""

    records: tuple[Record, ...]
    skipped: int
    """Number of invalid lines; one at the end is normal after a kill."""
    exists: bool


def read_json_lines(file: Path) -> JsonLines:
    """Read every line with a JSON object; a missing file has no records."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return JsonLines(records=(), skipped=0, exists=False)
    records: list[Record] = []
    lines = [line for line in text.splitlines() if line.strip()]
    for line in lines:
        with contextlib.suppress(ValueError):
            if isinstance(record := json.loads(line), dict):
                records.append(record)
    return JsonLines(records=tuple(records), skipped=len(lines) - len(records), exists=True)


class RecordedRun:
    """Recorded data of one run; each file is read once, at first use."""

    def __init__(self, path: str | Path) -> None:
        """Open the folder ``path``. Raises DataError if it does not exist."""
        self.path = Path(path)
        self._config_problem: str | None = None
        if not self.path.is_dir():
            raise DataError(f"{self.path}: no such run folder")

    @cached_property
    def config_text(self) -> str | None:
        """Text of the resolved run file; None without one."""
        file = self.path / "config.yaml"
        return file.read_text(encoding="utf-8") if file.exists() else None

    @cached_property
    def config(self) -> RunConfig | None:
        """Validated run file; None if it is missing or incompatible with this version of rollmesh."""
        try:
            return load_run_config(self.path / "config.yaml", environ={})
        except ConfigError as error:
            self._config_problem = str(error)
            return None

    @property
    def config_problem(self) -> str | None:
        """Reason for a missing config; None with a config."""
        return None if self.config is not None else self._config_problem

    @property
    def name(self) -> str:
        """Name of the run; that of its folder without a config."""
        return self.path.resolve().name if self.config is None else self.config.name

    @cached_property
    def schedule(self) -> Schedule | None:
        """Schedule of the run, resolved from preset and overrides; None without a config."""
        return None if self.config is None else Schedule.from_config(self.config)

    @property
    def max_staleness(self) -> int | None:
        """Staleness bound of the run, in train steps; None without a config."""
        return None if self.schedule is None else self.schedule.max_staleness

    @property
    def mask_old_segments(self) -> bool:
        """True if tokens over the bound leave the loss; False without a config."""
        return self.schedule is not None and self.schedule.on_stale is OnStale.MASK_OLD_SEGMENTS

    @cached_property
    def metrics(self) -> JsonLines:
        """Step reports."""
        return read_json_lines(self.path / "metrics.jsonl")

    @cached_property
    def timeline(self) -> JsonLines:
        """Samples of the mesh, about one per second."""
        return read_json_lines(self.path / "timeline.jsonl")

    @cached_property
    def evaluations(self) -> JsonLines:
        """Evaluations by policy version."""
        return read_json_lines(self.path / "evaluations.jsonl")

    @cached_property
    def samples(self) -> JsonLines:
        """Sample completions."""
        return read_json_lines(self.path / "samples.jsonl")

    @cached_property
    def failure(self) -> str:
        """Reason of a failure after the last start; empty without a failure."""
        if not (self.path / FAILURE_FILE).exists():
            return ""
        lines = read_json_lines(self.path / FAILURE_FILE).records  # empty if the disk was full
        return str(lines[0].get("message", "") if lines else "") or f"{FAILURE_FILE} has no reason; the logs name it"

    @cached_property
    def checkpoint_section(self) -> CheckpointConfig:
        """Recorded checkpoint section, with the location of the environment: another machine may have its own."""
        if self.config is None:
            return CheckpointConfig()
        location = {name: value for name, value in os.environ.items() if name.startswith(_LOCATION_VARIABLES)}
        return load_run_config(self.path / "config.yaml", environ=location).checkpoints

    @property
    def checkpoints(self) -> Path:
        """Folder of this node that has checkpoints: the store, or the cache of an object store."""
        return self.checkpoint_section.on_this_node(self.path)

    def replace_file(self, name: str, text: str) -> Path:
        """Write a file of the folder atomically; return its path."""
        file = self.path / name
        temporary = self.path / f".{name}.{os.getpid()}.tmp"
        try:
            with writing(file):
                temporary.write_text(text, encoding="utf-8")
            return temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)

    def logs(self) -> tuple[Path, ...]:
        """List the log files, sorted by name."""
        return tuple(sorted((self.path / "logs").glob("*.log")))

    def missing(self) -> tuple[str, ...]:
        """Describe the data that this run lacks."""
        absent: list[str] = []
        if self.config_problem is not None:
            absent.append(f"config: {self.config_problem}")
        for name, lines in (
            ("metrics.jsonl", self.metrics),
            ("timeline.jsonl", self.timeline),
            ("evaluations.jsonl", self.evaluations),
            ("samples.jsonl", self.samples),
        ):
            if not lines.records:
                absent.append(f"{name}: {'empty' if lines.exists else 'not written'}")
            if lines.skipped:
                absent.append(f"{name}: {lines.skipped} unreadable line(s) skipped")
        return tuple(absent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One line of ``evaluations.jsonl``."""

    policy_version: int
    n: int
    """Number of scores in the mean."""
    mean: float
    standard_error: float | None = None
    """None for fewer than two prompts with a score."""
    details: Mapping[str, float] = field(default_factory=dict)
    """Other statistics, such as the mean length."""
    discarded: int = 0
    when: float | None = None
    """Unix seconds; None if they are not recorded."""
    seconds: float | None = None
    """Seconds from the request to the result."""
    domains: Mapping[str, DomainScore] = field(default_factory=dict)
    """Scores by domain of the prompts; empty without domains."""

    @classmethod
    def read(cls, records: Iterable[Record]) -> list[Self]:
        """Read lines in their order, without those that lack version, n or mean, or have no score (n = 0)."""
        found: list[Self] = []
        for record in records:
            values: dict[str, Any] = {
                k: v for k, v in record.items() if isinstance(v, int | float) and math.isfinite(v)
            }
            if {"policy_version", "n", "mean"} <= values.keys() and values["n"] > 0:
                own = {each.name: values.pop(each.name) for each in fields(cls) if each.name in values}
                found.append(cls(**own, domains=record.get("domains", {}), details=values))
        return found

    def to_json(self) -> str:
        """Return the JSON line, with the details next to the other fields."""
        record = asdict(self)
        details = record.pop("details")
        return json.dumps(record | details)

    @property
    def description(self) -> str:
        """Describe the score for the console; there is none when every response was discarded."""
        if self.n == 0:
            return f"evaluation without a score: none of {self.discarded} answers counts"
        shortage = f"; {self.shortage}" if self.shortage else ""
        whole = f"evaluation {self.mean:.3f} {plus_minus(self.standard_error)} (n={self.n}){shortage}"
        return whole + "".join(f"; {line}" for line in domain_scores(self.domains))

    @property
    def shortage(self) -> str:
        """Reasons for fewer scores than requested; empty without one."""
        reasons = []
        if self.discarded:
            count = f"{self.discarded} of {self.n + self.discarded} answers"
            reasons.append(f"{count} have no score and are left out of the mean: the run's logs name the reasons")
        if REQUESTED_PROMPTS in self.details:
            reasons.append(fewer_prompts(self.details[REQUESTED_PROMPTS], self.details[EXISTING_PROMPTS]))
        return "; ".join(reasons)
