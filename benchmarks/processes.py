"""Processes that benches start: Redis, and the commands of rollmesh."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from rollmesh.config import RunConfig, load_run_config
from rollmesh.errors import DataError
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.store.embedded import EmbeddedOptions, EmbeddedServer

_ROOT = Path(__file__).resolve().parents[1]
_TRL_SECONDS = 1800.0


@contextmanager
def running_redis(folder: Path, megabytes: int) -> Iterator[EmbeddedServer]:
    """Run a Redis server with AOF everysec and this limit of memory during the block."""
    server = EmbeddedServer(folder, EmbeddedOptions(maxmemory_bytes=megabytes << 20))
    server.start()
    try:
        yield server
    finally:
        server.kill()


def command(*arguments: object) -> list[str]:
    """Return the command line of ``rollmesh`` with these arguments."""
    return [sys.executable, "-P", "-m", "rollmesh.cli.main", *map(str, arguments)]


def train_with_trl(
    python: Path, root: Path, job: Mapping[str, Any], *, processes: int = 1, threads: int = 1
) -> list[dict[str, Any]]:
    """Train as ``trl_training.py`` says, in TRL's environment, and return the history. Raises DataError if it fails."""
    jobs, history = root / "jobs.json", root / "history.json"
    jobs.write_text(json.dumps([{**job, "history": str(history)}]))
    ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    done = subprocess.run(
        [python, *ranks, _ROOT / "benchmarks" / "trl_training.py", jobs],
        # Without PYTHONSAFEPATH the script's folder comes first, with benchmarks/queue.py for the module queue.
        env={
            **os.environ,
            "PYTHONPATH": str(_ROOT / "services"),
            "PYTHONSAFEPATH": "1",
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "HF_HOME": str(root),
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        timeout=_TRL_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        raise DataError(f"TRL ended with status {done.returncode}\n{done.stderr[-4000:]}")
    found: list[dict[str, Any]] = json.loads(history.read_text())
    return found


def write_run_file(file: Path, data: Mapping[str, Any]) -> RunConfig:
    """Write a run file and read it back, without variables of the environment."""
    file.write_text(yaml.safe_dump(dict(data)), encoding="utf-8")
    return load_run_config(file, environ={})


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """Training run of the demo's model below ``root``: its run file, its launcher and its output."""

    root: Path

    @property
    def folder(self) -> RunFolder:
        """Run folder."""
        return RunFolder(self.root / "run")

    @property
    def output(self) -> str:
        """Text that the launcher, and other commands on the run, have printed."""
        return (self.root / "output.txt").read_text()

    @contextmanager
    def up(
        self, data: Mapping[str, Any], variables: Mapping[str, str] = MappingProxyType({})
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Start ``rollmesh up`` with further environment variables.

        Its remaining processes are killed at the end, also when this process gets a SIGTERM.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        (self.root / "run.yaml").write_text(yaml.safe_dump(dict(data)))
        with (self.root / "output.txt").open("ab") as log:
            process = subprocess.Popen(
                command("up", self.root / "run.yaml"),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **variables},
            )
        before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        try:
            yield process
        finally:
            signal.signal(signal.SIGTERM, before)
            process.kill()
            process.wait()
            # The launcher stops its server, unless it was killed.
            EmbeddedServer(self.folder.redis).kill()

    def train(self, data: Mapping[str, Any], seconds: float) -> RecordedRun:
        """Run ``rollmesh up`` to its end. Raises DataError with its output for a run that fails."""
        with self.up(data) as launcher:
            status = launcher.wait(seconds)
        if status != 0:
            raise DataError(f"{self.root.name} ended with status {status}\n{self.output[-4000:]}")
        return RecordedRun(self.folder.path)
