"""Updates of the demo beside TRL's GRPOTrainer: equal model, task, batch and machine.

Ours is a run of the demo, all its processes; its rate is between the ends of the first and the last update. TRL is the
script of a user (``trl_training.py``) in an environment of its own (``python -m tests.kit.environments trl``), without
its first update. It samples with transformers, in turn with the updates. The baseline is the fastest of its settings.
"""

import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.frame import Measure, Quick, at_least, compared
from benchmarks.processes import TrainingRun, train_with_trl
from rollmesh.config.recipes import recipe_file
from rollmesh.errors import ConfigError
from rollmesh.recipes.countdown.demonstrations import starter_rows
from rollmesh.report.series import newest_per_step, number
from tests.kit.environments import ENVIRONMENTS, NotInstalled

_SETTINGS: Mapping[str, tuple[int, int]] = {
    "one process": (1, 1),
    "one process of two threads": (1, 2),
    "two processes": (2, 1),
}
"""Processes, and threads of each."""
_ANSWERS = 128
_RUN_SECONDS = 1800.0


@dataclass(frozen=True, slots=True)
class Pace:
    """Wall time and trained tokens of an update, in the mean."""

    seconds: float
    tokens: float


def run(*, quick: Quick = False) -> list[Measure]:
    """Measure. Raises ConfigError without the environment, DataError for a run that fails."""
    try:
        python = ENVIRONMENTS["trl"].find_python()
    except NotInstalled as error:
        raise ConfigError(f"bench trl: {error}") from error
    with tempfile.TemporaryDirectory(prefix="rollmesh-bench-") as folder:
        names = list(_SETTINGS)[: 1 if quick else None]
        peers = {name: _trl(Path(folder), python, *_SETTINGS[name], updates=2 if quick else 4) for name in names}
        ours = _demo(Path(folder) / "demo", updates=3 if quick else 12)
    name, best = min(peers.items(), key=lambda item: item[1].seconds)
    bars = (at_least("ratio", 15.0),)
    rates = {"updates": (1 / ours.seconds, 1 / best.seconds)}
    rates["trained tokens"] = (ours.tokens / ours.seconds, best.tokens / best.seconds)
    settings = {f"an update of TRL, {name}": pace for name, pace in peers.items()} | {"an update of the demo": ours}
    return [
        *(compared(what, mine, "a second", f"TRL, {name}", other, bars) for what, (mine, other) in rates.items()),
        *(Measure(name=name, value=pace.seconds, unit="seconds") for name, pace in settings.items()),
        *(
            Measure(name=f"tokens of {name}", value=pace.tokens / _ANSWERS, unit="tokens an answer")
            for name, pace in settings.items()
        ),
    ]


def _trl(root: Path, python: Path, processes: int, threads: int, *, updates: int) -> Pace:
    rows = root / "rows.jsonl"
    rows.write_text(starter_rows())
    job = {"model": str(recipe_file("countdown", "model")), "data": str(rows), "steps": updates, "learning_rate": 4e-4}
    history = train_with_trl(python, root, job, processes=processes, threads=threads)
    steps = [line for line in history if "step_time" in line][1:]
    seconds, length = (
        statistics.fmean(float(step[name]) for step in steps) for name in ("step_time", "completions/mean_length")
    )
    return Pace(seconds, _ANSWERS * length)


def _demo(root: Path, updates: int) -> Pace:
    run = TrainingRun(root)
    data = yaml.safe_load(recipe_file("countdown", "demo.yaml").read_text()) | {"folder": str(run.folder.path)}
    data["trainer"]["train_steps"] = updates
    data["evaluation"]["before_and_after"] = False
    steps = newest_per_step(run.train(data, _RUN_SECONDS).metrics.records)
    times = [number(step, "time") for step in steps]
    tokens = statistics.fmean(number(step, "batch.trained_tokens") for step in steps[1:])
    return Pace((times[-1] - times[0]) / (len(times) - 1), tokens)
