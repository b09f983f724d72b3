"""Records of the train steps: JSON lines in the run folder, sample completions, and optional trackers."""

import json
import os
import secrets
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rollmesh.checkpoints.durable import disk_full_error, full_disk
from rollmesh.config import RunConfig
from rollmesh.errors import ConfigError, DataError
from rollmesh.runtime.logging import get_logger
from rollmesh.text import Tokenizer
from rollmesh.types import Batch, Int32Array, Trajectory

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"


class StepRecords:
    """The two log files of a run. Only the trainer that holds the session writes them.

    ``tidy`` drops the lines of steps that will be replayed, and duplicates of a fenced trainer or a retried write, so
    every step has one line at the end. Writes raise CheckpointError (disk_full) on a full disk and may be retried.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._metrics = folder / METRICS_FILE
        self._samples = folder / SAMPLES_FILE

    def tidy(self, train_step: int) -> None:
        """Drop the lines of later steps, duplicates, and an incomplete last line."""
        for file in (self._metrics, self._samples):
            keep_lines_up_to(file, train_step)

    def append(self, record: Mapping[str, Any], samples: Iterable[Mapping[str, Any]]) -> None:
        """Append the line of one step and its samples, and fsync them."""
        append_lines(self._samples, samples)
        append_lines(self._metrics, [record])

    def newest(self, most: int, train_step: int) -> list[dict[str, Any]]:
        """Return the reports up to ``train_step`` among the last ``most`` lines, ascending; none without the file."""
        if not self._metrics.exists():
            return []
        with self._metrics.open("rb") as stream:
            lines = deque(stream, maxlen=most)
        found = {step[0]: line for line in lines if (step := _identity(line)) is not None and step[0] <= train_step}
        return [json.loads(found[step]) for step in sorted(found)]


def append_lines(file: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append JSON objects, one per line, all or none; NaN and infinities become null."""
    text = "".join(json.dumps(finite(record), separators=(",", ":"), allow_nan=False) + "\n" for record in records)
    with _convert_disk_full(file), file.open("ab", buffering=0) as stream:
        before, rest = stream.seek(0, os.SEEK_END), text.encode()
        try:
            while rest:
                rest = rest[stream.write(rest) :]
            os.fsync(stream.fileno())
        except OSError:
            # A partial line would corrupt the next one.
            with suppress(OSError):
                stream.truncate(before)
            raise


def keep_lines_up_to(file: Path, train_step: int) -> None:
    """Rewrite a file without the lines of steps above ``train_step``, unreadable lines and duplicates."""
    if not file.exists():
        return
    before = file.read_bytes()
    kept: dict[tuple[int, str], bytes] = {}
    for line in before.splitlines(keepends=True):
        identity = _identity(line)
        if identity is not None and identity[0] <= train_step:
            kept[identity] = line
    after = b"".join(kept.values())
    if after == before:
        return
    temporary = file.with_name(f".{file.name}.tmp")
    with _convert_disk_full(file):
        with temporary.open("wb") as stream:
            stream.write(after)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)


@contextmanager
def _convert_disk_full(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if full_disk(error):
            raise disk_full_error(file.parent, file.name, error) from error
        raise


def _identity(line: bytes) -> tuple[int, str] | None:
    """Return train step and trajectory id (empty for a report) of a line; None if it is incomplete."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(step := record.get("train_step"), int):
        return None
    return step, str(record.get("trajectory_id", ""))


def finite(value: Any) -> Any:
    """Copy a JSON value with None in place of NaN and infinities."""
    if isinstance(value, float):
        return value if value - value == 0.0 else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


Decode = Callable[[Int32Array], str]


def decoder(folder: Path) -> Decode:
    """Return a function from token ids to text with the model's tokenizer; without one, to the ids as text."""
    tokenizer = Tokenizer(folder) if (folder / "tokenizer.json").is_file() else None

    def decode(ids: Int32Array) -> str:
        with suppress(DataError):
            if tokenizer is not None:
                return tokenizer.decode(ids, special_tokens=True)
        return " ".join(map(str, ids.tolist()))

    return decode


def sample_completions(batch: Batch, count: int, decode: Decode) -> list[dict[str, Any]]:
    """Select ``count`` trajectories, at most one of a group, spread over the groups and of other members each step."""
    count = min(count, len(batch.groups))
    chosen: list[Trajectory] = []
    for i in range(count):
        members = batch.groups[i * len(batch.groups) // count].trajectories
        chosen.append(members[(batch.train_step + i) % len(members)])
    return [
        {
            "train_step": batch.train_step,
            "trajectory_id": t.trajectory_id,
            "prompt": decode(t.prompt.token_ids),
            "completion": decode(t.response_ids),
            "token_count": t.response_token_count,
            "finish_reason": t.finish_reason and str(t.finish_reason),
            "outcome": t.outcome and str(t.outcome.kind),
            "reward": t.outcome and t.outcome.verdict,
            "shaped_reward": t.shaped_reward,
            "policy_versions": list(t.policy_versions),
        }
        for t in chosen
    ]


class Tracker(ABC):
    """A destination of numbers by train step. Its failures are logged, not raised: metrics.jsonl has every number."""

    name: str

    def log(self, train_step: int, numbers: Mapping[str, float]) -> None:
        """Record the numbers of one step. A replayed step is recorded again."""
        with self._logged(train_step=train_step):
            self._record(train_step, numbers)

    def close(self) -> None:
        """Flush and close the tracker."""
        with self._logged():
            self._close()

    @contextmanager
    def _logged(self, **fields: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # any error of the tracker's client
            get_logger("trackers").error("tracker_failed", tracker=self.name, message=repr(error), **fields)

    @abstractmethod
    def _record(self, train_step: int, numbers: Mapping[str, float]) -> None: ...

    @abstractmethod
    def _close(self) -> None: ...


def build_trackers(config: RunConfig) -> list[Tracker]:
    """Build the trackers of ``telemetry.trackers``; raise ConfigError with the name of an extra that is missing."""
    makers: dict[str, Callable[[RunConfig], Tracker]] = {"tensorboard": TensorBoardTracker, "wandb": WandbTracker}
    return [makers[name](config) for name in dict.fromkeys(config.telemetry.trackers)]


def flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Flatten the numbers of a nested record to ``a/b/c`` names. Lists and text are dropped."""
    numbers: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            numbers |= flatten(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[f"{prefix}{key}"] = float(value)
    return numbers


class TensorBoardTracker(Tracker):
    """Event files in ``<run folder>/tensorboard``."""

    name = "tensorboard"

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
            get_logger("trackers").error("tracker_failed", tracker=self.name, message=repr(error))

    def _record(self, train_step: int, numbers: Mapping[str, float]) -> None:
        # After a failed write the next step starts a new file.
        writer, self._writer = self._writer or self._open(), None
        for name, value in numbers.items():
            writer.add_scalar(name, value, train_step)
        writer.flush()
        self._writer = writer

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbTracker(Tracker):
    """A Weights & Biases run with the name of this run; ``tracker_options.wandb`` is passed to ``wandb.init``.

    Continuing the run continues the W&B run. The x-axis is ``train_step``: W&B's own steps only increase, and W&B drops
    numbers for an older step, which a resumed or rolled back trainer would log.
    """

    name = "wandb"

    def __init__(self, config: RunConfig) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing("wandb") from error
        # By folder: two of them may contain runs with the same name. The file is empty after a power cut.
        stable_id = Path(config.folder) / "wandb-id"
        if not stable_id.exists() or not stable_id.stat().st_size:
            stable_id.parent.mkdir(parents=True, exist_ok=True)
            stable_id.write_text(f"{config.name}-{secrets.token_hex(4)}", encoding="utf-8")
        options: dict[str, Any] = {
            "name": config.name,
            "id": stable_id.read_text(encoding="utf-8"),
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

    def _record(self, train_step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({"train_step": train_step, **numbers})

    def _close(self) -> None:
        self._run.finish()  # it uploads the remaining data


def _missing(extra: str) -> ConfigError:
    return ConfigError(f"telemetry.trackers: {extra} is not installed (pip install 'rollmesh[{extra}]')")
