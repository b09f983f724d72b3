"""Records of a real run that a simulation is calibrated on: train steps, loads of policies, generators' work."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from rollmesh.errors import DataError
from rollmesh.report.recorded_run import Record, RecordedRun, read_json_lines
from rollmesh.report.series import newest_per_step, train_series

_LEAST_UPDATES = 3
"""Train steps of a calibration: the first one has the start of the services in its times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedWork:
    """Work of one generator in an interval."""

    steps: float
    """Decode steps."""
    tokens: float
    """Sampled tokens: the sum of the running calls over the steps."""
    prefill_tokens: float
    busy_seconds: float
    """Seconds in prefill and decode."""


def work_between(before: Mapping[str, float], after: Mapping[str, float]) -> RecordedWork:
    """Return the work between two readings of a generator's counters."""
    counters = ("decode_steps", "generated_tokens", "prefill_tokens", "busy_seconds")
    steps, tokens, prefill_tokens, busy_seconds = (after[name] - before[name] for name in counters)
    return RecordedWork(steps=steps, tokens=tokens, prefill_tokens=prefill_tokens, busy_seconds=busy_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedUpdate:
    """Times of one train step, Unix seconds."""

    tokens: int
    """Response tokens of the batch."""
    forward_tokens: int
    """Tokens of its prompts and responses."""
    cut_at: float
    gradient_seconds: float
    trained_at: float
    copied_at: float
    """Time at which the trainer went on, with the weights copied out."""
    announced_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecords:
    """One run: all its recorded train steps, and its work from the end of the first one on."""

    folder: Path
    """Run folder, with the lengths."""
    updates: tuple[TrainedUpdate, ...]
    """Train steps in their order, two or more."""
    work: tuple[RecordedWork, ...]
    generators: int
    generator_cpu_seconds: float
    """Processor seconds, from the first to the last recorded train step."""
    service_cpu_seconds: float
    """Those of all other services together without the trainer, the queue's server included."""
    reward_seconds: float
    """Mean time from the last token of an answer to its reward."""
    fetch_seconds: float
    """Mean time of a load during which the old policy serves."""
    swap_seconds: float
    """Mean pause of a load."""

    @property
    def updates_per_second(self) -> float:
        """Rate from the end of the first train step to the end of the last one."""
        return (len(self.updates) - 1) / (self.updates[-1].trained_at - self.updates[0].trained_at)


def recorded_times(run: RecordedRun) -> RunRecords:
    """Return the records of a run since its newest start.

    Scores take no time in them: no file of the folder has it. Raises DataError for a folder with too little.
    """
    if run.config is None:
        raise DataError(f"{run.path}: {run.config_problem}")
    if run.config.generator.speculation != "off":
        raise DataError(f"{run.path}: its decode steps have drafts in them; give a run with generator.speculation=off")
    pauses = train_series(run.metrics.records, run.timeline.records).pauses
    began = float(pauses[-1, 1]) if len(pauses) else 0.0
    updates = tuple(update for update in trained_updates(run.path) if update.cut_at >= began)
    if len(updates) < _LEAST_UPDATES:
        raise DataError(
            f"{run.path}: {len(updates)} train steps with their times in metrics.jsonl and logs/; a calibration needs "
            f"{_LEAST_UPDATES}: give a longer run"
        )
    totals = [line["work"] for line in run.timeline.records if line.get("work") and line["t"] >= updates[0].trained_at]
    # Counters of a generator that restarts begin at zero.
    steps = [(a, b) for a, b in pairwise(totals) if all(b.get(name, -1.0) >= a[name] for name in a)]
    work = tuple(work_between(before, after) for before, after in steps if "decode_steps" in before)
    if not any(each.steps for each in work):
        raise DataError(
            f"{run.path}: no decode steps in timeline.jsonl: rollmesh up writes them, for an engine that counts them "
            "(torch); give such a run"
        )
    fetch_seconds, swap_seconds = load_seconds(run.path)
    return RunRecords(
        folder=run.path,
        updates=updates,
        work=work,
        generators=run.config.generator.replicas,
        generator_cpu_seconds=sum(b["cpu_seconds"] - a["cpu_seconds"] for a, b in steps),
        service_cpu_seconds=0.0,
        reward_seconds=0.0,
        fetch_seconds=fetch_seconds,
        swap_seconds=swap_seconds,
    )


def announcements(folder: Path) -> dict[int, float]:
    """Return the times at which policies were announced, by train step; the initial one has 0."""
    return {event["train_step"]: _time(event) for event in _events(folder, "trainer-*.log", "policy_announced")}


def trained_updates(folder: Path) -> tuple[TrainedUpdate, ...]:
    """Return the train steps of a run whose policy was announced, in order."""
    cuts = {event["train_step"]: _time(event) for event in _events(folder, "rollout-*.log", "batch_cut")}
    announced = announcements(folder)
    copied = {event["train_step"]: _time(event) for event in _events(folder, "trainer-*.log", "step_trained")}
    known = cuts.keys() & announced.keys() & copied.keys()
    return tuple(
        TrainedUpdate(
            tokens=int(line["batch"]["trained_tokens"]),
            forward_tokens=int(line["forward_tokens"]),
            cut_at=cuts[line["train_step"]],
            gradient_seconds=float(line["seconds"]["gradient"]),
            trained_at=float(line["time"]),
            copied_at=copied[line["train_step"]],
            announced_at=announced[line["train_step"]],
        )
        for line in newest_per_step(RecordedRun(folder).metrics.records)
        if line["train_step"] in known
    )


def load_seconds(folder: Path) -> tuple[float, float]:
    """Return the mean seconds of loads after the first ones, without and of their pauses."""
    loads = [event for event in _events(folder, "generator-*.log", "policy_in_service") if event["train_step"]]
    if not loads:
        raise DataError(f"{folder}: no load of a policy in logs/generator-*.log: a calibration needs them")
    pauses = [float(event["pause_seconds"]) for event in loads]
    fetches = [float(event["seconds"]) - pause for event, pause in zip(loads, pauses, strict=True)]
    return sum(fetches) / len(loads), sum(pauses) / len(loads)


def _events(folder: Path, pattern: str, name: str) -> list[Record]:
    records = (record for log in sorted((folder / "logs").glob(pattern)) for record in read_json_lines(log).records)
    return [record for record in records if record.get("event") == name]


def _time(event: Record) -> float:
    return datetime.fromisoformat(str(event["timestamp"])).timestamp()
