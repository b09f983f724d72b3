"""Optional trackers beside metrics.jsonl: TensorBoard and Weights & Biases (extras of the same name)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from rollmesh.config import RunConfig
from rollmesh.errors import ConfigError


class Tracker(Protocol):
    """Somewhere that numbers by train step go."""

    def log(self, train_step: int, numbers: Mapping[str, float]) -> None:
        """Record the numbers of one step; a replayed step overwrites itself."""

    def close(self) -> None:
        """Flush and end."""


def build_trackers(config: RunConfig) -> list[Tracker]:
    """The trackers of ``telemetry.trackers``; raises ConfigError naming the extra that is not installed."""
    makers: dict[str, Callable[[RunConfig], Tracker]] = {"tensorboard": TensorBoardTracker, "wandb": WandbTracker}
    return [makers[name](config) for name in dict.fromkeys(config.telemetry.trackers)]


def flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers of a nested record by ``a/b/c`` names; lists and text are left out."""
    numbers: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            numbers |= flatten(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[f"{prefix}{key}"] = float(value)
    return numbers


class TensorBoardTracker:
    """Event files in ``<run folder>/tensorboard``."""

    def __init__(self, config: RunConfig) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard") from error
        options = dict(config.telemetry.tracker_options.get("tensorboard", {}))
        self._writer = SummaryWriter(**({"log_dir": str(Path(config.folder) / "tensorboard")} | options))

    def log(self, train_step: int, numbers: Mapping[str, float]) -> None:
        """Record the numbers of one step."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, train_step)
        self._writer.flush()

    def close(self) -> None:
        """End the event file."""
        self._writer.close()


class WandbTracker:
    """A Weights & Biases run with the name of this run; ``tracker_options.wandb`` goes to ``wandb.init``."""

    def __init__(self, config: RunConfig) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing("wandb") from error
        options = {"name": config.name, "id": config.name, "resume": "allow", "dir": config.folder}
        settings = config.model_dump(mode="json", exclude={"store": {"password", "url"}, "checkpoints": {"secret"}})
        self._run = wandb.init(**(options | dict(config.telemetry.tracker_options.get("wandb", {}))), config=settings)

    def log(self, train_step: int, numbers: Mapping[str, float]) -> None:
        """Record the numbers of one step."""
        self._run.log(dict(numbers), step=train_step)

    def close(self) -> None:
        """Upload what is left."""
        self._run.finish()


def _missing(extra: str) -> ConfigError:
    return ConfigError(f"telemetry.trackers: {extra} is not installed (pip install 'rollmesh[{extra}]')")
