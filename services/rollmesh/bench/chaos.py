"""``rollmesh bench chaos``: short runs of the real mesh with one fault each, and an audit of every run.

Every round is a whole run of the demo's model (``rollmesh up`` in a new folder) with one fault at a random moment. The
counts come from the run's audit: batch files and committed states, not Redis. An outside judge reads the same files
with independent code (``bench.judge``), and must agree with the audit.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from rollmesh.bench.attack import AttackedRun, Cost, Fault
from rollmesh.bench.faults import KillLeader, KillService, KillTrainerAfter, StallService
from rollmesh.bench.faults_of_files import DamageLastStep, DamagePolicy, DamageReplay, DamageState
from rollmesh.bench.faults_of_redis import FillRedis, KillRedis, StallRedis
from rollmesh.bench.measure import Bar, Figure, Measure, at_most, compared
from rollmesh.bench.rounds import EXEMPT, Round, read_round, rounds_table
from rollmesh.config.recipes import recipe_file
from rollmesh.errors import ConfigError, RollmeshError
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.report.console import output_console
from rollmesh.store.embedded import EmbeddedServer

SEED = 20261121
_ROUND_SECONDS = 400.0
_STOP_SECONDS = 120.0
_SESSION_TTL_SECONDS = 5.0

_TRAIN_STEPS = 24
_PARTIAL_SAVE_TOKENS = (64, 16)
"""Values of even and odd rounds: calls that wait for acknowledgements, and calls that end by their length."""

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
    DamageReplay(),
    KillRedis(zero_bytes=4096),
    DamagePolicy(),
    DamageLastStep(_TRAIN_STEPS),
    DamageState(),
    DamageLastStep(_TRAIN_STEPS, after_the_end=True),
)
"""Faults in the order of the rounds; ``make test`` runs the first four."""


class ChaosError(RollmeshError):
    """A round failed a requirement."""


def run(*, rounds: int | None = None, quick: bool = False, fault: str | None = None) -> list[Measure]:
    """Run the rounds, print the table, and return the counts; ``quick`` runs four rounds.

    ``rounds`` None runs every fault once. ``fault`` names the fault of all rounds. Raises ChaosError if a round fails a
    requirement, and ConfigError for an unknown fault.
    """
    faults = faults_named(fault)
    results = run_rounds(4 if quick else rounds or len(faults), output_console(stderr=True), faults=faults)
    failed = [r for r in results if not r.passed]
    if failed:
        raise ChaosError(f"{len(failed)} of {len(results)} rounds failed: {', '.join(r.fault for r in failed)}")
    survived = [r for r in results if r.expected_end.green]
    none = (at_most(Figure.VALUE, 0.0),)
    counts: dict[str, tuple[str, int, tuple[Bar, ...]]] = {
        "rounds passed": ("rounds", len(results), ()),
        "groups lost": ("groups", sum(r.lost for r in survived), none),
        "groups trained twice": ("groups", sum(r.trained_twice for r in survived), none),
        "staleness violations": ("trajectories", sum(r.staleness_violations for r in survived), none),
    }
    return [
        *(Measure(name=name, value=value, unit=unit, bars=bars) for name, (unit, value, bars) in counts.items()),
        *(_regeneration(number, r) for number, r in enumerate(results, 1) if r.expected_end.green),
    ]


def _regeneration(number: int, result: Round) -> Measure:
    name, tokens = f"regenerated tokens, round {number}: {result.fault}", result.regenerated_tokens or 0
    bound = result.regenerated_bound
    if bound is None:
        return Measure(name=f"{name} ({EXEMPT})", value=tokens, unit="tokens")
    bars = (at_most(Figure.VALUE, bound),)
    return compared(name, tokens, "tokens", f"bound for {result.in_flight} rollouts", bound, bars)


def faults_named(name: str | None) -> Sequence[Fault]:
    """Return the fault of this name, or all faults for None. Raises ConfigError with the known names."""
    found = [fault for fault in FAULTS if name in (None, fault.name)]
    if not found:
        raise ConfigError(
            f"--fault {name!r}: unknown fault; choose one of: {'; '.join(fault.name for fault in FAULTS)}"
        )
    return found


def run_rounds(
    rounds: int, console: Console, folder: Path | None = None, faults: Sequence[Fault] = FAULTS
) -> list[Round]:
    """Run ``rounds`` rounds with the fixed seed; print a line for each round, and the table at the end."""
    rng = random.Random(SEED)
    results: list[Round] = []
    with tempfile.TemporaryDirectory(prefix="rollmesh-chaos-") as temporary:
        root = folder or Path(temporary)
        for number in range(rounds):
            fault = faults[number % len(faults)]
            console.print(f"round {number + 1} of {rounds}: {fault.name}", highlight=False)
            result = run_round(root / f"round-{number}", number, fault, rng)
            if not result.passed:
                problems = "".join(f"\nthe judge: {problem}" for problem in result.judge_problems)
                console.print(f"[red]failed[/red]\n{result.output[-4000:]}{problems}", highlight=False)
            results.append(result)
    console.print(rounds_table(results))
    return results


def run_round(folder: Path, number: int, fault: Fault, rng: random.Random) -> Round:
    """Run one round with one fault."""
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
        attacked = AttackedRun(
            folder=run_folder.path,
            run=str(data["name"]),
            redis=EmbeddedServer(run_folder.redis),
            rng=rng,
            ended=lambda: process.poll() is not None,
            deadline=deadline,
        )
        try:
            _attack(attacked, fault)
            _wait(process, max(1.0, deadline - time.monotonic()))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            # The launcher stops its server, unless it was killed.
            attacked.redis.kill()
    seconds = time.monotonic() - start
    statuses: tuple[int, ...] = (process.returncode,)
    if not fault.expected_end.green:
        statuses += (_audit(run_folder),)
    return read_round(run_folder, data, fault, attacked, statuses, seconds, (folder / "output.txt").read_text())


def round_config(folder: Path, number: int) -> dict[str, Any]:
    """Return the run file of a round: the demo's model and task, small batches, trainer state every third step."""
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


def _attack(attacked: AttackedRun, fault: Fault) -> None:
    """Wait for a random train step in the first third of the run, then for a random moment, and inject the fault."""
    step = attacked.rng.randint(2, _TRAIN_STEPS // 3)
    while attacked.train_step() < step:
        if not attacked.may_strike():
            return
        time.sleep(0.02)
    time.sleep(attacked.rng.uniform(0.0, 0.3))
    fault.inject(attacked)
    attacked.fault_ended_at.append(time.time())


def _audit(folder: RunFolder) -> int:
    """Audit a finished run; return the exit status."""
    command = [sys.executable, "-m", "rollmesh.cli.main", "audit", str(folder.path)]
    return subprocess.run(command, capture_output=True, timeout=_ROUND_SECONDS, check=False).returncode


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for the run; after the time limit send SIGTERM, and use the exit status that follows."""
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_STOP_SECONDS)
