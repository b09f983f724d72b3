"""Optional trackers in addition to metrics.jsonl: TensorBoard and Weights & Biases (extras of the same name)."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from rollmesh.config import RunConfig
from rollmesh.errors import ConfigError
from rollmesh.runtime.logging import get_logger


class Tracker(Protocol):
    """A destination of numbers by train step."""

    def log(self, train_step: int, numbers: Mapping[str, float]) -> None:
        """Record the numbers of one step. A replayed step is recorded again."""

    def close(self) -> None:
        """Flush and close the tracker."""


def build_trackers(config: RunConfig) -> list[Tracker]:
    """Build the trackers of ``telemetry.trackers``; raise ConfigError with the name of an extra that is not installed.

    Later failures are only logged: metrics.jsonl has every number, so a tracker must not stop the run.
    """
    makers: dict[str, Callable[[RunConfig], Tracker]] = {"tensorboard": TensorBoardTracker, "wandb": WandbTracker}
    return [_OptionalTracker(name, makers[name](config)) for name in dict.fromkeys(config.telemetry.trackers)]


def flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Flatten the numbers of a nested record to ``a/b/c`` names. Lists and text are dropped."""
    numbers: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            numbers |= flatten(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[f"{prefix}{key}"] = float(value)
    return numbers


class _OptionalTracker:
    """A tracker whose failures are logged and not raised."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name = name
        self._tracker = tracker
        self._log = get_logger("trackers")

    def log(self, train_step: int, numbers: Mapping[str, float]) -> None:
        try:
            self._tracker.log(train_step, numbers)
        except Exception as error:  # any error of the tracker's client
            self._log.error("tracker_failed", tracker=self._name, train_step=train_step, message=repr(error))

    def close(self) -> None:
        try:
            self._tracker.close()
        except Exception as error:  # any error of the tracker's client
            self._log.error("tracker_failed", tracker=self._name, message=repr(error))


class TensorBoardTracker:
    """Event files in ``<run folder>/tensorboard``."""

    def __init__(self, config: RunConfig) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard") from error
        options = dict(config.telemetry.tracker_options.get("tensorboard", {}))
        options = {"log_dir": str(Path(config.folder) / "tensorboard")} | options
        self._open: Callable[[], SummaryWriter] = lambda: SummaryWriter(**options)
        self._writer: SummaryWriter | None = None
        try:
            self._writer = self._open()
        except TypeError as error:
            raise ConfigError(f"telemetry.tracker_options.tensorboard: {error}") from error
        except OSError as error:  # for example a full disk; the next step retries
            get_logger("trackers").error("tracker_failed", tracker="tensorboard", message=repr(error))

    def log(self, train_step: int, numbers: Mapping[str, float]) -> None:
        """Record the numbers of one step. After a failed write the next step starts a new file."""
        writer, self._writer = self._writer or self._open(), None
        for name, value in numbers.items():
            writer.add_scalar(name, value, train_step)
        writer.flush()
        self._writer = writer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbTracker:
    """A Weights & Biases run with the name of this run; ``tracker_options.wandb`` is passed to ``wandb.init``.

    Continuing the run continues the W&B run. The x-axis is ``train_step``: W&B's own steps only increase, and W&B drops
    numbers for an older step, which a resumed or rolled back trainer would log.
    """

    def __init__(self, config: RunConfig) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing("wandb") from error
        options: dict[str, Any] = {
            "name": config.name,
            "id": _stable_id(Path(config.folder) / "wandb-id", config.name),
            "resume": "allow",
            "dir": config.folder,
            # Keep rollmesh's log lines out of W&B. W&B's own messages are in its folder.
            "settings": {"console": "off", "silent": True},
        }
        options |= config.telemetry.tracker_options.get("wandb", {})
        settings = config.model_dump(mode="json", exclude={"store": {"password", "url"}, "checkpoints": {"secret"}})
        try:
            self._run = wandb.init(**options, config=settings)
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise ConfigError(
                f"telemetry.trackers: wandb: {error} Set WANDB_API_KEY, or WANDB_MODE=offline to sync files later"
            ) from error
        self._run.define_metric("train_step")
        self._run.define_metric("*", step_metric="train_step")
        get_logger("trainer").info(
            "wandb_run", id=self._run.id, folder=self._run.dir, url="" if self._run.offline else self._run.url
        )

    def log(self, train_step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({"train_step": train_step, **numbers})

    def close(self) -> None:
        """Upload the remaining data."""
        self._run.finish()


def _stable_id(file: Path, name: str) -> str:
    """Return the W&B id of this run folder. Two folders may contain runs with the same name."""
    # The file is empty after a power cut before its content was on disk.
    if not file.exists() or not file.stat().st_size:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{name}-{secrets.token_hex(4)}", encoding="utf-8")
    return file.read_text(encoding="utf-8")


def _missing(extra: str) -> ConfigError:
    return ConfigError(f"telemetry.trackers: {extra} is not installed (pip install 'rollmesh[{extra}]')")
