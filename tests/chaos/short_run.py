"""Short training run of the demo's model, for rounds of chaos and for random requests."""

import subprocess
from collections.abc import Mapping
from functools import reduce
from operator import getitem
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from benchmarks.processes import TrainingRun, command
from rollmesh.config.recipes import recipe_file
from rollmesh.scheduling.presets import PRESETS, companion_fields

SESSION_TTL_SECONDS = 5.0
TRAIN_STEPS = 24
_PARTIAL_SAVE_TOKENS = (64, 16)
"""Values of even and odd rounds: calls that wait for acknowledgements, and calls that end by their length."""
_AUDIT_SECONDS = 1200.0


def short_run_config(
    folder: Path,
    number: int,
    preset: str = "copris",
    settings: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    base: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the run file of a short run: the demo's model and task, small batches, trainer state every third step.

    ``base`` is a run file with another model and task.

    Another preset than ``copris`` brings its own numbers and the settings that go with it. Some of them allow no
    replayed step, so every step has a trainer state. ``settings`` are further fields by section.
    """
    demo = recipe_file("countdown", "demo.yaml")
    data: dict[str, Any] = yaml.safe_load(demo.read_text()) if base is None else dict(base)
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


def finished_train_steps(folder: Path) -> int:
    """Return the number of finished train steps of a run: the lines of its metrics."""
    metrics = folder / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def audit(run: TrainingRun) -> int:
    """Audit a run, with the output beside that of its launcher; return the exit status."""
    with (run.root / "output.txt").open("ab") as log:
        words = command("audit", run.folder.path)
        return subprocess.run(words, stdout=log, stderr=log, timeout=_AUDIT_SECONDS, check=False).returncode
