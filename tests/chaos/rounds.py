"""Result of one round of the chaos bench, from the files of its run."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from rollmesh.launcher.run_folder import RunFolder
from rollmesh.mesh import DropReason

from .attack import AttackedRun
from .faults import Cost, ExpectedEnd, Fault
from .judge import judge
from .judge.full_weights import delta_count
from .judge.trained_groups import group_rules

_EXEMPT = "no bound"
"""Bound of a round that may waste any number of tokens; the reason is printed below the table."""
_EXEMPT_BECAUSE = (
    f"{_EXEMPT}: a killed Redis loses data that is not in its file or is cut off it, also finished rollouts, which are "
    "sampled again; surplus members are cut off with unsaved tokens; the saved tokens of an agent are not only sampled "
    "ones; all other requirements apply. A run that must not end green has no bound either"
)
_ENDS_UNFINISHED = (DropReason.STALE, DropReason.STRAGGLER_TIMEOUT, DropReason.TOO_FEW_SCORED)
"""Reasons to drop a group whose members may be in progress, before the end of the run."""
_MOST_TRAINER_ENDS = 3
"""Maximum number of trainer exits in a run with a final error: the kill, the error, and one in between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosRound:
    """Result of one round."""

    fault: str
    expected_end: ExpectedEnd
    """Required end of the run."""
    injected: bool
    """True if the fault was injected; for a fault that the run must survive, only before the last train step."""
    exit_statuses: tuple[int, ...]
    """Exit statuses of the commands that ``ExpectedEnd`` names."""
    trainer_ends: int
    """Number of trainer exits that the console reported."""
    seconds: float
    lost: int
    trained_twice: int
    staleness_violations: int
    green: bool
    """Result of the audit: True if it is green."""
    judge_problems: tuple[str, ...]
    """Problems that the outside judge reports, and those of an outside agent."""
    in_flight: int
    """Rollouts in flight at the victim at the time of the fault."""
    regenerated_tokens: int | None
    """Sampled tokens that were never saved, the cost of the fault (see ``regenerated``); None without a count."""
    regenerated_bound: int | None
    """Allowed cost of the fault (``Cost``) on all rollouts in flight at its victim, and of the groups that the schedule
    ended unfinished; None if Redis loses data."""
    deltas: int | None
    """Policies that the bucket has as deltas; None for a run without a bucket."""
    output: str

    @property
    def passed(self) -> bool:
        """True if all requirements are met, and the audit and the judge agree."""
        expected = self.expected_end
        ended_as_expected = self.exit_statuses == expected.exit_statuses and self.green == expected.green
        has_output = expected.output_contains in " ".join(self.output.split())  # the console wraps long lines
        agree = self.green == (not self.judge_problems)
        if not (self.injected and ended_as_expected and has_output and agree) or self.deltas == 0:
            return False
        if not expected.green:
            return self.trainer_ends <= _MOST_TRAINER_ENDS
        tokens = self.regenerated_tokens
        is_within = self.regenerated_bound is None or (tokens is not None and tokens <= self.regenerated_bound)
        return is_within and not (self.lost or self.trained_twice or self.staleness_violations)


def rounds_table(results: Sequence[ChaosRound]) -> Table:
    """Return the table that ``make chaos`` prints."""
    count_columns = ("lost", "twice", "stale", "in flight", "regenerated", "bound")
    columns = ("round", "fault", "result", "seconds", "audit", "judge")
    exempt = any(r.regenerated_bound is None for r in results)
    table = Table(*columns, *count_columns, caption=_EXEMPT_BECAUSE if exempt else None, caption_justify="left")
    for number, r in enumerate(results, 1):
        verdict = "ok" if r.passed else "FAILED"
        bound = _EXEMPT if r.regenerated_bound is None else str(r.regenerated_bound)
        row = (number, r.fault if r.injected else f"{r.fault} (did not strike)", verdict, f"{r.seconds:.0f}")
        verdicts = (
            "green" if r.green else "not green",
            f"{len(r.judge_problems)} problems" if r.judge_problems else "sound",
        )
        counts = (r.lost, r.trained_twice, r.staleness_violations, r.in_flight, r.regenerated_tokens, bound)
        table.add_row(*map(str, (*row, *verdicts, *counts)))
    return table


def read_round(
    folder: RunFolder,
    data: Mapping[str, Any],
    fault: Fault,
    attacked: AttackedRun,
    exit_statuses: tuple[int, ...],
    seconds: float,
    output: str,
    bucket: Path | None = None,
    agent_problems: tuple[str, ...] = (),
) -> ChaosRound:
    """Read the audit of a finished run, and run the outside judge on its files; ``bucket`` is a copy of its bucket."""
    audit_file = folder.path / "audit.json"
    audit: dict[str, Any] = json.loads(audit_file.read_text()) if audit_file.exists() else {}
    in_flight = sum(attacked.in_flight) + rollouts_cut_off(folder, attacked.killed_generators)
    expected, last_step = fault.expected_end, int(data["trainer"]["train_steps"])
    bound = regenerated_bound(fault.cost, in_flight, data, groups_ended_unfinished(folder)) if expected.green else None
    return ChaosRound(
        fault=fault.name,
        expected_end=expected,
        injected=any(step < last_step or not expected.green for step in attacked.struck_at),
        exit_statuses=exit_statuses,
        trainer_ends=output.count("trainer-0 ended with status"),
        seconds=seconds,
        lost=_count(audit.get("lost")),
        trained_twice=_count(audit.get("trained_twice")),
        staleness_violations=_count(audit.get("staleness_violations")),
        green=bool(audit.get("green")),
        judge_problems=(*_judge_problems(folder, bucket), *agent_problems),
        in_flight=in_flight,
        regenerated_tokens=regenerated(folder, attacked.sampled_when_killed, max(attacked.fault_ended_at, default=0.0)),
        regenerated_bound=bound,
        deltas=None if bucket is None else delta_count(bucket),
        output=output,
    )


def _judge_problems(folder: RunFolder, bucket: Path | None) -> tuple[str, ...]:
    try:
        return judge(folder.path, checkpoints=bucket).problems
    except OSError as error:
        return (f"no run to judge: {error}",)


def regenerated_bound(cost: Cost, in_flight: int, data: Mapping[str, Any], ended_groups: int = 0) -> int | None:
    """Return the tokens that a run may waste with ``in_flight`` rollouts at the victim of its fault.

    The schedule has ended ``ended_groups`` unfinished ones without any fault, and every member of them may have had
    unsaved tokens. ``data`` is the run file.
    """
    if cost is Cost.UNBOUNDED:
        return None
    rollouts = 0 if cost is Cost.NOTHING else in_flight
    members = ended_groups * group_rules(data).most_members
    return (rollouts + members) * int(data["rollout"][Cost.UNSAVED.value])


def groups_ended_unfinished(folder: RunFolder) -> int:
    """Count the groups that were evicted or have begun again, from the newest metrics."""
    lines = folder.metrics.read_text().splitlines() if folder.metrics.exists() else []
    mesh: Mapping[str, Any] = json.loads(lines[-1])["mesh"] if lines else {}
    evicted = sum(mesh.get("dropped_groups", {}).get(reason, 0) for reason in _ENDS_UNFINISHED)
    return int(evicted + sum(mesh.get("groups_begun_again_by_reason_and_length_decile", {}).values()))


def rollouts_cut_off(folder: RunFolder, addresses: Sequence[str]) -> int:
    """Count the rollouts with broken calls on generators at these addresses, from the logs of the workers.

    Calls that could not connect to the address had no tokens there.
    """
    found = set()
    for log in (*folder.logs.glob("rollout-*.log"), *folder.logs.glob("agents-*.log")):
        for line in log.read_text().splitlines():
            record = json.loads(line) if '"generator_misbehaved"' in line else {}
            broken = record.get("reason") == "broken" and record.get("address") in addresses
            if broken and "Failed to connect" not in record["message"]:
                found.add(record["trajectory"])
    return len(found)


def _count(value: object) -> int:
    """Return a count of the audit, which may be a list of ids; -1 without an audit."""
    if isinstance(value, list | dict):
        return len(value)
    return int(value) if isinstance(value, int) else -1


def regenerated(folder: RunFolder, sampled_when_killed: Mapping[str, float], since: float = 0.0) -> int | None:
    """Count the tokens that generators sampled and the queue never received, from the timeline of an idle mesh.

    The result is the smallest count of the samples after ``since`` (Unix seconds of the end of the fault) without
    leases and running calls: later samples also contain the last tokens of rollouts that the end of the run releases.
    Without such a sample, the last one counts. ``sampled_when_killed`` are the counters of killed processes, which the
    timeline, with one sample a second, has missed; they exclude tokens from the milliseconds between the last reply of
    a generator and its death. A Redis that lost the tail of its file counts fewer tokens as saved, so its rounds have
    no bound. None without a timeline.
    """
    lines = folder.timeline.read_text().splitlines() if folder.timeline.exists() else []
    if not lines:
        return None
    samples = [json.loads(line) for line in lines]
    last = samples[-1]
    totals = last["generated_tokens"]
    unseen = sum(max(0.0, value - totals.get(key, 0.0)) for key, value in sampled_when_killed.items())
    idle = [sample for sample in samples[:-1] if sample["t"] > since and _is_idle(sample, len(last["generators"]))]
    missing = min(sample["generated_token_total"] - sample["saved_token_total"] for sample in (*idle, last))
    return max(0, int(missing + unseen))


def _is_idle(sample: Mapping[str, Any], generators: int) -> bool:
    """Return True if every generator answered and is idle, and no trajectory is leased."""
    idle = all(g["running"] == g["waiting"] == 0 for g in sample["generators"])
    return idle and len(sample["generators"]) == generators and sample["view"]["leased"] == 0
