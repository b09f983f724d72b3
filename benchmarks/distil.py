"""Distillation of the demo's trained policy into its initial one, beside as many updates with rewards.

The teacher is the policy of a demo after its 40 updates, exported. Each seed is a run of examples/distil.yaml, and one
of the demo with its rewards, of 30 updates each. All accuracies are of the same prompts. The reverse KL per token is
read in windows of updates; a rise from one to the next counts beyond two standard errors.
"""

import math
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from benchmarks.frame import NONE, Measure, Quick, at_least, compared
from benchmarks.processes import TrainingRun
from rollmesh.config.recipes import recipe_file
from rollmesh.report.audit_result import AuditVerdict
from rollmesh.report.compare import Spread, spread_of
from rollmesh.report.model_export import export_model
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.report.sentences import NOISE_STANDARD_ERRORS
from rollmesh.report.series import newest_per_step, number
from rollmesh.report.summary import RunSummary, summarise

_EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "distil.yaml"
_UPDATES, _QUICK_UPDATES = 30, 10
_TEACHER_UPDATES, _QUICK_TEACHER_UPDATES = 40, 12
_SEEDS = (0, 1, 2)
_PROMPTS = 512
_WINDOW = 5
_RUN_SECONDS = 3600.0


def run(*, quick: Quick = False) -> list[Measure]:
    """Measure. Raises DataError for a run that fails."""
    updates = _QUICK_UPDATES if quick else _UPDATES
    demo, example = _read(recipe_file("countdown", "demo.yaml")), _read(_EXAMPLE)
    with tempfile.TemporaryDirectory(prefix="rollmesh-bench-") as folder:
        root, model = Path(folder), Path(folder) / "model"
        teacher = _trained(root / "teacher", demo, 0, _QUICK_TEACHER_UPDATES if quick else _TEACHER_UPDATES)
        export_model(teacher.path, model)
        example["teachers"]["trained"]["model"] = str(model)
        arms: dict[str, list[RecordedRun]] = {"distilled": [], "with rewards": []}
        for seed in _SEEDS[: 1 if quick else None]:
            for (name, runs), data in zip(arms.items(), (example, demo), strict=True):
                runs.append(_trained(root / f"{name.split()[0]}-{seed}", data, seed, updates))
        return _measures(teacher, arms, updates)


def _measures(teacher: RecordedRun, arms: Mapping[str, Sequence[RecordedRun]], updates: int) -> list[Measure]:
    goal = _gain(summarise(teacher))
    measures = []
    summaries = {name: list(map(summarise, runs)) for name, runs in arms.items()}
    bars = (at_least("ratio", 0.85),) if updates == _UPDATES else ()
    for name in arms:
        gain = spread_of([_gain(summary) for summary in summaries[name]])
        assert gain is not None
        measures.append(
            compared(
                f"gain of {updates} updates, {name}",
                gain.mean,
                "accuracy",
                "the teacher's gain",
                goal,
                bars if name == "distilled" else (),
            )
        )
        if gain.standard_error is not None:
            error = gain.standard_error
            measures.append(Measure(name=f"standard error of it over seeds, {name}", value=error, unit="accuracy"))
    windows = reverse_kl_windows([newest_per_step(run.metrics.records) for run in arms["distilled"]])
    verdicts = [summary.audit_verdict for runs in summaries.values() for summary in runs]
    return [
        *measures,
        *(
            Measure(
                name=f"reverse KL, updates {first} to {first + _WINDOW - 1}", value=window.mean, unit="nats a token"
            )
            for first, window in zip(range(1, updates, _WINDOW), windows, strict=True)
        ),
        Measure(name="rises of the reverse KL beyond noise", value=float(rises(windows)), unit="windows", bars=NONE),
        Measure(
            name="audits that are not green",
            value=float(sum(verdict != AuditVerdict.GREEN for verdict in verdicts)),
            unit="runs",
            bars=NONE,
        ),
    ]


def reverse_kl_windows(runs: Sequence[Sequence[Mapping[str, Any]]]) -> list[Spread]:
    """Return the reverse KL per token of each window of updates, over the step reports of all runs."""
    values = [[number(step, "batch.reverse_kl") for step in steps] for steps in runs]
    found = []
    for start in range(0, len(values[0]), _WINDOW):
        spread = spread_of([value for run in values for value in run[start : start + _WINDOW]])
        assert spread is not None
        found.append(spread)
    return found


def rises(windows: Sequence[Spread]) -> int:
    """Count the windows whose mean is above that of the one before, beyond the noise of both."""
    return sum(
        after.mean - before.mean
        > NOISE_STANDARD_ERRORS * math.hypot(before.standard_error or 0.0, after.standard_error or 0.0)
        for before, after in pairwise(windows)
    )


def _gain(summary: RunSummary) -> float:
    assert summary.before is not None and summary.after is not None
    return summary.after.mean - summary.before.mean


def _read(file: Path) -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return data


def _trained(root: Path, data: Mapping[str, Any], seed: int, updates: int) -> RecordedRun:
    run = TrainingRun(root)
    changed = {
        "folder": str(run.folder.path),
        "seed": seed,
        "trainer": {**data["trainer"], "train_steps": updates},
        "evaluation": {"prompt_count": _PROMPTS, "temperature": 1.0},
        "gateway": {"enabled": False},
    }
    return run.train({**data, **changed}, _RUN_SECONDS)
