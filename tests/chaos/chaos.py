"""Short runs of the real mesh with one fault each, and an audit of every run.

Every round is a whole run of the demo's model (``rollmesh up`` in a new folder) with one fault at a random moment. The
counts come from the run's audit: batch files and committed states, not Redis. An outside judge reads the same files
with independent code (``tests.chaos.judge``), and must agree with the audit.
"""

import contextlib
import random
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.frame import Measure, Quick
from benchmarks.processes import TrainingRun
from rollmesh.errors import ConfigError, RollmeshError
from rollmesh.report.console import output_console
from rollmesh.store.embedded import EmbeddedServer

from ..kit.environments import ENVIRONMENTS, NotInstalled
from ..kit.s3_server import CREDENTIALS, MISSING, Bucket, is_installed
from .attack import AttackedRun
from .faults import FAULTS, Fault, Outside, faults_named
from .outside_process import OutsideProcess
from .rounds import ChaosRound, read_round, rounds_table
from .short_run import TRAIN_STEPS, audit, finished_train_steps, short_run_config

SEED = 20261121
_ROUND_SECONDS = 900.0
_STOP_SECONDS = 120.0
_PREFIX = "round"


class ChaosError(RollmeshError):
    """A round failed a requirement."""


def run(
    *,
    quick: Quick = False,
    rounds: Annotated[int | None, typer.Option(help="Rounds; default: each fault once.", min=1)] = None,
    fault: Annotated[str | None, typer.Option(help="Run only this fault.")] = None,
) -> list[Measure]:
    """Run the rounds, print the table, and return their number; ``quick`` runs four rounds.

    ``rounds`` None runs every fault once. ``fault`` names the fault of all rounds. Raises ChaosError if a round fails a
    requirement, and ConfigError for an unknown fault or without the packages of a bucket or an environment.
    """
    faults = faults_named(fault)
    count = 4 if quick else rounds or len(faults)
    if not is_installed() and any(each.in_bucket for each in faults[:count]):
        raise ConfigError(f"rounds with an object store: {MISSING}")
    if any(each.outside is Outside.ENVIRONMENT for each in faults[:count]):
        try:
            ENVIRONMENTS["openenv"].find_python()
        except NotInstalled as missing:
            raise ConfigError(f"rounds with an environment: {missing}") from missing
    results = run_rounds(count, output_console(stderr=True), faults=faults)
    failed = [r for r in results if not r.passed]
    if failed:
        raise ChaosError(f"{len(failed)} of {len(results)} rounds failed: {', '.join(r.fault for r in failed)}")
    return [Measure(name="rounds passed", value=len(results), unit="rounds")]


def run_rounds(
    rounds: int, console: Console, folder: Path | None = None, faults: Sequence[Fault] = FAULTS
) -> list[ChaosRound]:
    """Run ``rounds`` rounds with the fixed seed; print a line for each round, and the table at the end."""
    rng = random.Random(SEED)
    results: list[ChaosRound] = []
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


def run_round(folder: Path, number: int, fault: Fault, rng: random.Random) -> ChaosRound:
    """Run one round with one fault."""
    folder.mkdir(parents=True)
    run = TrainingRun(folder)
    outside = None if fault.outside is Outside.NOTHING else OutsideProcess(fault.outside, folder / "outside")
    base = None if outside is None else outside.run_file()
    data = short_run_config(run.folder.path, number, fault.preset, fault.settings, base)
    data["gateway"] = {**data.get("gateway", {}), "enabled": False}
    start = time.monotonic()
    deadline = start + _ROUND_SECONDS
    with contextlib.ExitStack() as stack:
        if outside is not None:
            stack.enter_context(outside.working(data))
        server = Bucket(folder / "s3.log") if fault.in_bucket else None
        if server is not None:
            stack.callback(server.stop)
            section = {"folder": f"s3://{server.name}/{_PREFIX}", "object_store": server.options}
            data["checkpoints"] |= section
        with run.up(data, {} if server is None else CREDENTIALS) as process:
            attacked = AttackedRun(
                folder=run.folder.path,
                run=str(data["name"]),
                redis=EmbeddedServer(run.folder.redis),
                rng=rng,
                ended=lambda: process.poll() is not None,
                deadline=deadline,
                environment=None if outside is None else outside.server,
            )
            _attack(attacked, fault)
            _wait(process, max(1.0, deadline - time.monotonic()))
        seconds, output = time.monotonic() - start, run.output
        statuses: tuple[int, ...] = (process.returncode,)
        if not fault.expected_end.green:
            statuses += (audit(run),)
        if server is not None:
            server.copy(_PREFIX, folder / "bucket")
    bucket = folder / "bucket" if fault.in_bucket else None
    problems = () if outside is None else outside.problems
    return read_round(run.folder, data, fault, attacked, statuses, seconds, output, bucket, problems)


def _attack(attacked: AttackedRun, fault: Fault) -> None:
    """Wait for a random train step in the first third of the run, then for a random moment, and inject the fault."""
    step = attacked.rng.randint(2, TRAIN_STEPS // 3)
    if not attacked.wait_for(lambda: finished_train_steps(attacked.folder) >= step, 0.02):
        return
    time.sleep(attacked.rng.uniform(0.0, 0.3))
    fault.inject(attacked)
    attacked.fault_ended_at.append(time.time())


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for the run; after the time limit send SIGTERM, and use the exit status that follows."""
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_STOP_SECONDS)
