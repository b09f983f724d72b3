"""Processes that benches start: Redis, and the commands of rollmesh."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from rollmesh.config import RunConfig, load_run_config
from rollmesh.config.recipes import recipe_file
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.scheduling.companions import companion_fields
from rollmesh.scheduling.presets import PRESETS
from rollmesh.store.embedded import EmbeddedOptions, EmbeddedServer

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
"""Environment variables of a process with one thread for every library."""
SESSION_TTL_SECONDS = 5.0
TRAIN_STEPS = 24
_PARTIAL_SAVE_TOKENS = (64, 16)
"""Values of even and odd rounds: calls that wait for acknowledgements, and calls that end by their length."""
_AUDIT_SECONDS = 1200.0
_NO_SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType({})


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


def write_run_file(file: Path, data: Mapping[str, Any]) -> RunConfig:
    """Write a run file and read it back, without variables of the environment."""
    file.write_text(yaml.safe_dump(dict(data)), encoding="utf-8")
    return load_run_config(file, environ={})


def finished_train_steps(folder: Path) -> int:
    """Return the number of finished train steps of a run: the lines of its metrics."""
    metrics = folder / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """Training run of the demo's model below ``root``: its run file, its launcher and its audit."""

    root: Path

    @property
    def folder(self) -> RunFolder:
        """Run folder."""
        return RunFolder(self.root / "run")

    @property
    def output(self) -> str:
        """Text that the launcher and the audit have printed."""
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

    def audit(self) -> int:
        """Audit the run; return the exit status."""
        with (self.root / "output.txt").open("ab") as log:
            audit = command("audit", self.folder.path)
            return subprocess.run(audit, stdout=log, stderr=log, timeout=_AUDIT_SECONDS, check=False).returncode


def short_run_config(
    folder: Path, number: int, preset: str = "copris", settings: Mapping[str, Mapping[str, Any]] = _NO_SETTINGS
) -> dict[str, Any]:
    """Return the run file of a short run: the demo's model and task, small batches, trainer state every third step.

    Another preset than ``copris`` brings its own numbers and the settings that go with it. Some of them allow no
    replayed step, so every step has a trainer state. ``settings`` are further fields by section.
    """
    data: dict[str, Any] = yaml.safe_load(recipe_file("countdown", "demo.yaml").read_text())
    changes: dict[str, dict[str, Any]] = {
        "schedule": {"groups_per_batch": 8, "group_size": 4, "pool_size": 48, "max_staleness": 4},
        "rollout": {"max_new_tokens": 256, "partial_save_tokens": _PARTIAL_SAVE_TOKENS[number % 2]},
        "generator": {"replicas": 2, "slots": 32},
        "trainer": {"train_steps": TRAIN_STEPS},
        "checkpoints": {"state_every_steps": 3, "keep_last": 64},
        "store": {"heartbeat_seconds": 1.0, "session_ttl_seconds": SESSION_TTL_SECONDS},
        "launcher": {"rollout_replicas": 2},
        "evaluation": {"before_and_after": False, "every_versions": 0},
    }
    if preset != "copris":
        # The outside judge reads the bound from the run file.
        bound = PRESETS[preset].max_staleness
        changes["schedule"] |= {"preset": preset, "pool_size": None, "max_staleness": bound}
        changes["checkpoints"]["state_every_steps"] = 1
    for section, fields in (*changes.items(), *settings.items()):
        data[section] = {**data.get(section, {}), **fields}
    for field, value in companion_fields(PRESETS[preset]):
        section, *names = field.split(".")
        reduce(getitem, names[:-1], data[section])[names[-1]] = value
    return {**data, "name": f"chaos-{number}", "folder": str(folder), "seed": number}
