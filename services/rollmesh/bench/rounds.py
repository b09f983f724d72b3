"""How one round of the chaos bench ended, by the files of its run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from rollmesh.bench.attack import AttackedRun, Cost, Ending, Fault
from rollmesh.bench.judge import judge
from rollmesh.launcher.run_folder import RunFolder

EXEMPT = "no bound"
"""Bound of a round whose fault makes Redis forget, or ends the run; the reason is printed below the table."""
_EXEMPT_BECAUSE = (
    f"{EXEMPT}: a killed Redis forgets what was not in its file yet or is cut off it, finished rollouts too, and they "
    "are sampled again; everything else is asked of these rounds as well. A run that must not end green has none either"
)
_MOST_TRAINER_ENDS = 3
"""How often the trainer of a run with a final error may end: killed, with the error, and once in between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """How one round ended."""

    fault: str
    ending: Ending
    """How it had to end."""
    injected: bool
    """Whether the fault struck; one that the run has to survive, while there were train steps left to do."""
    exit_statuses: tuple[int, ...]
    """Of the commands that ``Ending`` names."""
    trainer_ends: int
    """How often the console said that the trainer ended, and was started again."""
    seconds: float
    lost: int
    trained_twice: int
    staleness_violations: int
    green: bool
    """Verdict of the audit."""
    judged: tuple[str, ...]
    """Problems that the outside judge names."""
    in_flight: int
    """Rollouts that the victim held when it was struck."""
    regenerated_tokens: int | None
    """Sampled tokens that were never saved: what the fault cost (see ``regenerated``); None when nobody counted."""
    regenerated_bound: int | None
    """What the fault may cost (``Cost``) on all rollouts in flight at its victim; None when Redis itself loses work."""
    output: str

    @property
    def passed(self) -> bool:
        """Whether everything that was promised held, and audit and judge agree."""
        ending = self.ending
        ended = self.exit_statuses == ending.exit_statuses and self.green == ending.green
        said = ending.says in " ".join(self.output.split())  # the console wraps long lines
        if not (self.injected and ended and said and self.green == (not self.judged)):
            return False
        if not ending.green:
            return self.trainer_ends <= _MOST_TRAINER_ENDS
        counted = self.regenerated_tokens
        within = self.regenerated_bound is None or (counted is not None and counted <= self.regenerated_bound)
        return within and not (self.lost or self.trained_twice or self.staleness_violations)


def rounds_table(results: Sequence[Round]) -> Table:
    """The table that ``make chaos`` prints."""
    counted = ("lost", "twice", "stale", "in flight", "regenerated", "bound")
    columns = ("round", "fault", "result", "seconds", "audit", "judge")
    exempt = any(r.regenerated_bound is None for r in results)
    table = Table(*columns, *counted, caption=_EXEMPT_BECAUSE if exempt else None, caption_justify="left")
    for number, r in enumerate(results, 1):
        verdict = "ok" if r.passed else "FAILED"
        bound = EXEMPT if r.regenerated_bound is None else str(r.regenerated_bound)
        row = (number, r.fault if r.injected else f"{r.fault} (did not strike)", verdict, f"{r.seconds:.0f}")
        verdicts = ("green" if r.green else "not green", f"{len(r.judged)} problems" if r.judged else "sound")
        counts = (r.lost, r.trained_twice, r.staleness_violations, r.in_flight, r.regenerated_tokens, bound)
        table.add_row(*map(str, (*row, *verdicts, *counts)))
    return table


def round_of(
    folder: RunFolder,
    data: Mapping[str, Any],
    fault: Fault,
    scene: AttackedRun,
    exit_statuses: tuple[int, ...],
    seconds: float,
    output: str,
) -> Round:
    """Read the audit of a run that has ended, and let the outside judge read the rest."""
    audit_file = folder.path / "audit.json"
    audit: dict[str, Any] = json.loads(audit_file.read_text()) if audit_file.exists() else {}
    in_flight = sum(scene.in_flight) + rollouts_cut_off(folder, scene.killed_generators)
    ending, last_step = fault.ending, int(data["trainer"]["train_steps"])
    return Round(
        fault=fault.name,
        ending=ending,
        injected=any(step < last_step or not ending.green for step in scene.struck_at),
        exit_statuses=exit_statuses,
        trainer_ends=output.count("trainer-0 ended with status"),
        seconds=seconds,
        lost=_count(audit.get("lost")),
        trained_twice=_count(audit.get("trained_twice")),
        staleness_violations=_count(audit.get("staleness_violations")),
        green=bool(audit.get("green")),
        judged=_judged(folder),
        in_flight=in_flight,
        regenerated_tokens=regenerated(folder, scene.counted, max(scene.over_at, default=0.0)),
        regenerated_bound=regenerated_bound(fault.cost, in_flight, data) if ending.green else None,
        output=output,
    )


def _judged(folder: RunFolder) -> tuple[str, ...]:
    try:
        return judge(folder.path).problems
    except OSError as error:
        return (f"no run to judge: {error}",)


def regenerated_bound(cost: Cost, in_flight: int, data: Mapping[str, Any]) -> int | None:
    """Tokens that a fault may waste when its victim holds ``in_flight`` rollouts; ``data`` is the run file."""
    if cost is Cost.UNBOUNDED:
        return None
    return 0 if cost is Cost.NOTHING else in_flight * int(data["rollout"][cost.value])


def rollouts_cut_off(folder: RunFolder, addresses: Sequence[str]) -> int:
    """Rollouts whose calls broke on generators at these addresses, by the logs of the workers.

    Calls that found nothing at the address any more had no tokens there.
    """
    found = set()
    for log in folder.logs.glob("rollout-*.log"):
        for line in log.read_text().splitlines():
            record = json.loads(line) if '"generator_misbehaved"' in line else {}
            broken = record.get("reason") == "broken" and record.get("address") in addresses
            if broken and "Failed to connect" not in record["message"]:
                found.add(record["trajectory"])
    return len(found)


def _count(value: object) -> int:
    """A count of the audit, which may list the offenders; -1 when there is no audit."""
    if isinstance(value, list | dict):
        return len(value)
    return int(value) if isinstance(value, int) else -1


def regenerated(folder: RunFolder, counted: Mapping[str, float], since: float = 0.0) -> int | None:
    """Tokens that generators sampled and the queue never got, by the timeline's looks at a mesh at rest.

    The smallest count of the looks after ``since`` (Unix seconds: the fault is over) at which nothing was leased and
    nothing ran: later ones also hold the last tokens of the rollouts that the end of the run lets go. Without such a
    look, the last one. ``counted`` are the counters of processes at the moment they were killed, which the timeline, a
    look a second, has not seen; what a generator sampled in the milliseconds between its last answer and its death is
    not in them. A Redis that lost the tail of its file counts less as saved: its rounds have no bound. None without a
    timeline.
    """
    lines = folder.timeline.read_text().splitlines() if folder.timeline.exists() else []
    if not lines:
        return None
    looks = [json.loads(line) for line in lines]
    last = looks[-1]
    unseen = sum(max(0.0, value - last["generated_tokens"].get(key, 0.0)) for key, value in counted.items())
    resting = [look for look in looks[:-1] if look["t"] > since and _at_rest(look, len(last["generators"]))]
    missing = min(look["generated_token_total"] - look["saved_token_total"] for look in (*resting, last))
    return max(0, int(missing + unseen))


def _at_rest(look: Mapping[str, Any], generators: int) -> bool:
    """Whether every generator answered and none was at work, and no trajectory was leased."""
    idle = all(g["running"] == g["waiting"] == 0 for g in look["generators"])
    return idle and len(look["generators"]) == generators and look["view"]["leased"] == 0
