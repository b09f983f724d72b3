"""The run folder: files of a run, and the lock against a second launcher.

config.yaml         the resolved run file (no secrets)
code-folder         path of the folder of the run file, for modules beside it
secret              key of the manifests' HMAC, mode 0600
mesh-token          bearer token of the services' ports, mode 0600, unless the run file has its own
logs/               one file per service process
services/           addresses of the processes
redis/              data of the embedded server
checkpoints/        policies, batch files, trainer states
metrics.jsonl       one line per train step
samples.jsonl       sample completions
timeline.jsonl      the mesh, about once a second
evaluations.jsonl   evaluations by policy version
failure.json        reason of a failed run; absent for any other run
report.html audit.json
untrained-N/        files of a start with other settings that cut no batch
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollmesh.characters import half_character
from rollmesh.checkpoints.batches import FOLDER as BATCHES
from rollmesh.config import RunConfig, load_run_config, write_run_config
from rollmesh.config.fixed_settings import reason_to_keep
from rollmesh.config.load import SECRETS
from rollmesh.config.sft_config import SFT_FILE
from rollmesh.errors import ConfigError
from rollmesh.runtime.locks import locked_folder
from rollmesh.runtime.logging import get_logger
from rollmesh.scheduling.resolved_schedule import resolved_section
from rollmesh.store.embedded import EmbeddedServer
from rollmesh.user_code import record_code_folder

_MOVED = ("redis", "checkpoints", "timeline.jsonl", "evaluations.jsonl", "samples.jsonl", "metrics.jsonl")
"""Redis first: a start after a crash in between finds a queue that is rebuilt from the checkpoints, not the reverse."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside a run folder, as listed above."""

    path: Path
    changes: tuple[str, ...] = ()
    """Settings that differ from those of the start before."""

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def redis(self) -> Path:
        return self.path / "redis"

    @property
    def timeline(self) -> Path:
        return self.path / "timeline.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def evaluations(self) -> Path:
        return self.path / "evaluations.jsonl"

    def log_file(self, service: str, index: int) -> Path:
        """Return the log file of one service process; restarts append to it."""
        return self.logs / f"{service}-{index}.log"


def make_run_folder(config: RunConfig) -> RunFolder:
    """Create the run folder of ``config`` unless it exists. Raises ConfigError when it cannot be created."""
    return RunFolder(made_folder(config.folder, "logs"))


def made_folder(name: str, inside: str) -> Path:
    """Create the folder of the field ``folder``, with one inside, unless they exist. ConfigError if it cannot be."""
    folder = Path(name).resolve()
    if half_character(str(folder)):
        shown = str(folder).encode("utf-8", "backslashreplace").decode()
        raise ConfigError(
            f"folder={name}: its path {shown} is not UTF-8 text, as files of the run must be; rename the "
            "folder in it that is not, or name another one"
        )
    try:
        (folder / inside).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"folder={name}: cannot be created: {error}") from error
    return folder


@contextlib.contextmanager
def locked_run_folder(config: RunConfig, remedy: str = "stop it first, or name another folder") -> Iterator[RunFolder]:
    """Create or continue the run folder of ``config`` and hold its lock.

    A run that has cut no batch may change every setting: its files are set aside. Raises ConfigError when the folder
    cannot be created, when another launcher holds it (``remedy`` ends the message), or when it belongs to a trained run
    with other settings.
    """
    folder = make_run_folder(config)
    if (folder.path / SFT_FILE).exists():
        raise ConfigError(f"folder={folder.path}: holds a run of rollmesh sft ({SFT_FILE}); name another folder")
    with locked_folder(folder.path, remedy):
        if folder.config_file.exists():
            changes = _refuse_other_settings(load_run_config(folder.config_file, environ={}), config, folder)
            folder = replace(folder, changes=changes)
        write_run_config(config.model_copy(update={"folder": str(folder.path)}), folder.config_file)
        record_code_folder(folder.path)
        yield folder


def _refuse_other_settings(before: RunConfig, now: RunConfig, folder: RunFolder) -> tuple[str, ...]:
    """Return the changes of settings that a run may change. Raises ConfigError for others of a trained run."""
    refused = refused_changes(before, now)
    if not refused:
        return _changes(before, now)
    local = all(run.store.url is None and run.checkpoints.folder is None for run in (before, now))
    cut = any((folder.path / "checkpoints" / BATCHES).glob("*.pb"))
    if local and not cut and not (folder.metrics.exists() and folder.metrics.stat().st_size > 0):
        _set_aside(folder.path)  # until the first batch nothing depends on the fixed settings
        return ()
    old, new = before.model_dump(mode="json"), now.model_dump(mode="json")
    changes = "; ".join(
        f"{name}: {reason} (recorded {_value(old, name)}, now {_value(new, name)})" for name, reason in refused.items()
    )
    names = (folder.path.with_name(f"{folder.path.name}-{number}") for number in range(2, 10_000))
    free = next(other for other in names if not other.exists())
    raise ConfigError(
        f"folder={folder.path} holds a run with other settings ({changes}). Continue it with its recorded settings "
        f"({folder.config_file}), or start a new run: the same command with --folder {free}"
    )


def refused_changes(before: RunConfig, now: RunConfig) -> dict[str, str]:
    """Return the changed fixed settings with their reasons; empty when the run may be continued.

    To write out a number of the preset is no change. Raises ConfigError for an impossible schedule.
    """
    old, new = (run.model_dump(mode="json") | {"schedule": resolved_section(run)} for run in (before, now))
    found = {name: reason_to_keep(name) for name in sorted(_differences(old, new))}
    if now.trainer.train_steps < before.trainer.train_steps:
        found["trainer.train_steps"] = f"it may only grow, and was {before.trainer.train_steps}"
    return {name: reason for name, reason in found.items() if reason is not None}


def _differences(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> set[str]:
    names: set[str] = set()
    for key in before.keys() | now.keys():
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            names |= _differences(old, new, f"{prefix}{key}.")
        elif old != new:
            names.add(f"{prefix}{key}")
    return names


def _changes(before: RunConfig, now: RunConfig) -> tuple[str, ...]:
    """Return a line for each changed setting, and log it; secrets and the location of the folder are left out."""
    old, new = before.model_dump(mode="json"), now.model_dump(mode="json")
    secrets = {".".join(path) for path in SECRETS}
    found = []
    for name in sorted(_differences(old, new) - secrets - {"folder"}):
        found.append(f"{name}: {_value(old, name)} -> {_value(new, name)}")
        get_logger("run-folder").warning("setting_changed", field=name, before=_value(old, name), now=_value(new, name))
    return tuple(found)


def _value(values: dict[str, Any], name: str) -> str:
    """Return the value of a dotted field as JSON; null for a field that the values lack."""
    found: Any = values
    for key in name.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return json.dumps(found)


def _set_aside(folder: Path) -> None:
    """Move the queue, the policies and the records of an untrained run into a new folder inside its run folder.

    So a typing error in the first start does not occupy the folder. Raises ConfigError if they cannot be moved.
    """
    target = next(path for number in range(1, 10_000) if not (path := folder / f"untrained-{number}").exists())
    EmbeddedServer(folder / "redis").stop()  # left by a killed launcher
    try:
        target.mkdir()
        for name in _MOVED:
            if (folder / name).exists():
                (folder / name).rename(target / name)
    except OSError as error:
        raise ConfigError(f"folder={folder}: the untrained run there cannot be set aside: {error}") from error
