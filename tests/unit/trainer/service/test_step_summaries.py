"""Fields of a step report in the queue: those that the gateway shows, and few others."""

from __future__ import annotations

import json
import math
from typing import Any

from rollmesh.gateway.curves import EVALUATION, Curves
from rollmesh.step_metrics import curves
from rollmesh.trainer.service.step_summaries import reported


def full_record() -> dict[str, Any]:
    """A line of metrics.jsonl with a number wherever a curve looks for one, and others beside them."""
    record: dict[str, Any] = {"train_step": 7, "time": 1_700_000_000.25, "policy_version": 7, "updates": 2}
    for number, metric in enumerate(curves().values(), start=1):
        inner = record
        *folders, name = metric.field.split(".")
        for key in folders:
            inner = inner.setdefault(key, {"other": 0.5})
        inner[name] = number / 7
    record["batch"]["trajectory_staleness"] = {"mean": 0.4, "max": 2, "histogram": {"0": 6, "2": 1}}
    record["seconds"] = {"evidence": 0.5, "gradient": 1.5, "update": 0.25, "statistics": 0.05}
    return record


def test_curves_are_the_same_from_what_the_queue_keeps() -> None:
    whole, kept = Curves(), Curves()
    whole.add_report(full_record())
    kept.add_report(json.loads(json.dumps(reported(full_record()))))
    assert kept.report == whole.report
    assert kept.trained_staleness == whole.trained_staleness != []
    names = list(curves())
    assert kept.answer(names, 10) == whole.answer(names, 10)
    assert all(series.x == [7.0] for series in kept.answer(names, 10).series)
    assert EVALUATION not in names


def test_fields_that_the_gateway_does_not_show_are_left_out() -> None:
    kept = reported(full_record())
    assert "other" not in json.dumps(kept)
    assert not {"policy_version", "updates"} & kept.keys()


def test_a_step_that_went_wrong_is_reported_as_json_all_the_same() -> None:
    record = full_record() | {"loss": math.nan, "grad_norm": None, "policy": {"ratio": None, "entropy": math.inf}}
    kept = json.loads(json.dumps(reported(record), allow_nan=False))
    assert (kept["loss"], kept["policy"]) == (None, {"entropy": None})
