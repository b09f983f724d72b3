"""``rollmesh bench chaos``: short runs of the real mesh, one fault each, counted by the audit afterwards.

Every round is a whole run of the demo's model (``rollmesh up`` in a folder of its own) with one fault at a random
moment. Counts come from the run's audit: batch files and committed states, not from Redis.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from rollmesh.bench.attack import Cost, Fault, Scene
from rollmesh.bench.faults import KillLeader, KillService, KillTrainerAfter, StallService
from rollmesh.bench.faults_of_redis import FillRedis, KillRedis, StallRedis
from rollmesh.bench.measure import Bar, Figure, Measure, at_most, compared
from rollmesh.config.recipes import recipe_file
from rollmesh.errors import RollmeshError
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.report.console import output_console
from rollmesh.store.embedded import EmbeddedServer

SEED = 20261121
_ROUND_SECONDS = 400.0
_STOP_SECONDS = 120.0
_SESSION_TTL_SECONDS = 5.0

_TRAIN_STEPS = 24
_PARTIAL_SAVE_TOKENS = (64, 16)
"""Of even and odd rounds: calls held back by acknowledgements, and calls that end by their length."""

FAULTS: tuple[Fault, ...] = (
    KillTrainerAfter("between state and publication", "checkpoints/states/*/COMMITTED"),
    KillService("generator"),
    KillRedis(lost_bytes=4096),
    StallService("rollout", 3 * _SESSION_TTL_SECONDS),
    KillTrainerAfter("between batch file and training", "checkpoints/batches/*.pb"),
    KillLeader(),
    StallRedis(60.0),
    KillTrainerAfter("while it saves its state", "checkpoints/states/*"),
    KillService("rollout"),
    FillRedis(8.0),
    KillTrainerAfter("while it publishes", "checkpoints/policies/*"),
    KillService("reward", Cost.NOTHING),
    KillRedis(lost_bytes=65536),
    StallService("generator", 10.0),
    KillTrainerAfter("between publication and announcement", "checkpoints/policies/*/manifest.json"),
    StallService("trainer", 10.0, Cost.NOTHING),
    KillRedis(away_seconds=40.0),
    KillService("trainer", Cost.NOTHING),
    StallService("reward", 10.0, Cost.NOTHING),
    KillRedis(lost_bytes=1 << 20),
)
"""In the order of the rounds: the first four are the ones that ``make test`` runs."""


_EXEMPT = "no bound"
"""Of a round whose fault makes Redis forget; ``_EXEMPT_BECAUSE`` stands below the table."""
_EXEMPT_BECAUSE = (
    f"{_EXEMPT}: a killed Redis forgets what was not in its file yet or is cut off it, finished rollouts too, and they "
    "are sampled again; everything else is asked of these rounds as well"
)


class ChaosError(RollmeshError):
    """A round did not keep what was promised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """How one round ended."""

    fault: str
    injected: bool
    """Whether the fault struck while there were train steps left to do."""
    exit_status: int
    seconds: float
    lost: int
    trained_twice: int
    staleness_violations: int
    green: bool
    in_flight: int
    """Rollouts that the victim held when it was struck."""
    regenerated_tokens: int | None
    """Sampled tokens that were never saved: what the fault cost (see ``_regenerated``); None when nobody counted."""
    regenerated_bound: int | None
    """What the fault may cost (``Cost``) on all rollouts in flight at its victim; None when Redis itself loses work."""
    output: str

    @property
    def passed(self) -> bool:
        """Whether everything that was promised held."""
        counted = self.regenerated_tokens
        within = self.regenerated_bound is None or (counted is not None and counted <= self.regenerated_bound)
        clean = not (self.lost or self.trained_twice or self.staleness_violations)
        return self.injected and self.exit_status == 0 and self.green and clean and within


def run(*, rounds: int = 20, quick: bool = False) -> list[Measure]:
    """Run the rounds, print the table, and return the counts; ``quick`` is four rounds.

    Raises ChaosError when a round did not keep what was promised.
    """
    results = run_rounds(4 if quick else rounds, output_console(stderr=True))
    failed = [r for r in results if not r.passed]
    if failed:
        raise ChaosError(f"{len(failed)} of {len(results)} rounds failed: {', '.join(r.fault for r in failed)}")
    none = (at_most(Figure.VALUE, 0.0),)
    counts: dict[str, tuple[str, int, tuple[Bar, ...]]] = {
        "rounds passed": ("rounds", len(results), ()),
        "groups lost": ("groups", sum(r.lost for r in results), none),
        "groups trained twice": ("groups", sum(r.trained_twice for r in results), none),
        "staleness violations": ("trajectories", sum(r.staleness_violations for r in results), none),
    }
    return [
        *(Measure(name=name, value=value, unit=unit, bars=bars) for name, (unit, value, bars) in counts.items()),
        *(_regeneration(number, r) for number, r in enumerate(results, 1)),
    ]


def _regeneration(number: int, result: Round) -> Measure:
    name, tokens = f"regenerated tokens, round {number}: {result.fault}", result.regenerated_tokens or 0
    bound = result.regenerated_bound
    if bound is None:
        return Measure(name=f"{name} ({_EXEMPT})", value=tokens, unit="tokens")
    bars = (at_most(Figure.VALUE, bound),)
    return compared(name, tokens, "tokens", f"bound for {result.in_flight} rollouts", bound, bars)


def run_rounds(rounds: int, console: Console, folder: Path | None = None) -> list[Round]:
    """Run ``rounds`` rounds with the fixed seed; prints a line a round and the table at the end."""
    rng = random.Random(SEED)
    results: list[Round] = []
    with tempfile.TemporaryDirectory(prefix="rollmesh-chaos-") as temporary:
        root = folder or Path(temporary)
        for number in range(rounds):
            fault = FAULTS[number % len(FAULTS)]
            console.print(f"round {number + 1} of {rounds}: {fault.name}", highlight=False)
            result = run_round(root / f"round-{number}", number, fault, rng)
            if not result.passed:
                console.print(f"[red]failed[/red]\n{result.output}", highlight=False)
            results.append(result)
    console.print(rounds_table(results))
    return results


def run_round(folder: Path, number: int, fault: Fault, rng: random.Random) -> Round:
    """One run with one fault."""
    folder.mkdir(parents=True)
    run_file = folder / "run.yaml"
    data = round_config(folder / "run", number)
    run_file.write_text(yaml.safe_dump(data))
    run_folder = RunFolder(folder / "run")
    start = time.monotonic()
    deadline = start + _ROUND_SECONDS
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "rollmesh.cli.main", "up", str(run_file)],
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
        )
        scene = Scene(
            folder=run_folder.path,
            run=str(data["name"]),
            redis=EmbeddedServer(run_folder.redis),
            rng=rng,
            ended=lambda: process.poll() is not None,
            deadline=deadline,
        )
        try:
            _attack(scene, fault)
            _wait(process, max(1.0, deadline - time.monotonic()))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            # The launcher stops its server; one that was killed could not.
            scene.redis.kill()
    seconds = time.monotonic() - start
    return _judge(run_folder, data, fault, scene, process.returncode, seconds, (folder / "output.txt").read_text())


def round_config(folder: Path, number: int) -> dict[str, Any]:
    """Run file of a round: the demo's model and task, small batches, trainer state every third step."""
    data: dict[str, Any] = yaml.safe_load(recipe_file("countdown", "demo.yaml").read_text())
    changes: dict[str, dict[str, Any]] = {
        "schedule": {"groups_per_batch": 8, "group_size": 4, "pool_size": 48, "max_staleness": 4},
        "rollout": {"max_new_tokens": 256, "partial_save_tokens": _PARTIAL_SAVE_TOKENS[number % 2]},
        "generator": {"replicas": 2, "slots": 32},
        "trainer": {"train_steps": _TRAIN_STEPS},
        "checkpoints": {"state_every_steps": 3, "keep_last": 64},
        "store": {"heartbeat_seconds": 1.0, "session_ttl_seconds": _SESSION_TTL_SECONDS},
        "launcher": {"rollout_replicas": 2},
        "evaluation": {"before_and_after": False, "every_versions": 0},
    }
    for section, fields in changes.items():
        data[section] = {**data.get(section, {}), **fields}
    return {**data, "name": f"chaos-{number}", "folder": str(folder), "seed": number}


def rounds_table(results: Sequence[Round]) -> Table:
    """The table that ``make chaos`` prints."""
    columns = ("round", "fault", "result", "seconds", "lost", "twice", "stale", "in flight", "regenerated", "bound")
    exempt = any(r.regenerated_bound is None for r in results)
    table = Table(*columns, caption=_EXEMPT_BECAUSE if exempt else None, caption_justify="left")
    for number, r in enumerate(results, 1):
        verdict = "ok" if r.passed else "FAILED"
        bound = _EXEMPT if r.regenerated_bound is None else str(r.regenerated_bound)
        row = (number, r.fault if r.injected else f"{r.fault} (did not strike)", verdict, f"{r.seconds:.0f}")
        counts = (r.lost, r.trained_twice, r.staleness_violations, r.in_flight, r.regenerated_tokens, bound)
        table.add_row(*map(str, (*row, *counts)))
    return table


def _attack(scene: Scene, fault: Fault) -> None:
    """Wait for a random train step of the first third, then a random moment, and inject."""
    step = scene.rng.randint(2, _TRAIN_STEPS // 3)
    while scene.train_step() < step:
        if not scene.waits():
            return
        time.sleep(0.02)
    time.sleep(scene.rng.uniform(0.0, 0.3))
    fault.inject(scene)
    scene.over_at.append(time.time())


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for the run; one that takes too long is asked to stop, and is judged by its status then."""
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_STOP_SECONDS)


def _judge(
    folder: RunFolder, data: dict[str, Any], fault: Fault, scene: Scene, status: int, seconds: float, output: str
) -> Round:
    audit_file = folder.path / "audit.json"
    audit: dict[str, Any] = json.loads(audit_file.read_text()) if audit_file.exists() else {}
    in_flight = sum(scene.in_flight) + rollouts_cut_off(folder, scene.killed_generators)
    return Round(
        fault=fault.name,
        injected=any(step < _TRAIN_STEPS for step in scene.struck_at),
        exit_status=status,
        seconds=seconds,
        lost=_count(audit.get("lost")),
        trained_twice=_count(audit.get("trained_twice")),
        staleness_violations=_count(audit.get("staleness_violations")),
        green=bool(audit.get("green")),
        in_flight=in_flight,
        regenerated_tokens=_regenerated(folder, scene.counted, max(scene.over_at, default=0.0)),
        regenerated_bound=regenerated_bound(fault.cost, in_flight, data),
        output=output[-4000:],
    )


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


def _regenerated(folder: RunFolder, counted: Mapping[str, float], since: float = 0.0) -> int | None:
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
