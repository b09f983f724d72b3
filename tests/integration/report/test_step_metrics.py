"""One row of the table of step metrics puts a number into every place that shows numbers of a train step."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.samples import Sample

from docs.build.metrics import metrics_document
from rollmesh import step_metrics
from rollmesh.config.loss_methods import MASKS
from rollmesh.gateway.curves import Curves
from rollmesh.prompt_history import DomainTotals
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.report.series import train_series
from rollmesh.runtime.metrics import Metrics
from rollmesh.step_metrics import STEP_METRICS, StepMetric
from rollmesh.trainer.learner.step_report import SpreadStats
from rollmesh.trainer.service.step_summaries import reported
from rollmesh.trainer.service.trainer_metrics import MOST_DOMAINS, TrainerMetrics

from .made_run import make_run, step_report

ROW = StepMetric(
    "kl_reference",
    "nats",
    "k3 KL(policy || reference) per token.",
    gauge="kl_reference_nats",
    curve="kl_reference",
    copy_of="policy.kl_reference",
)


@pytest.fixture
def with_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_metrics, "STEP_METRICS", (*STEP_METRICS, ROW))


@pytest.mark.usefixtures("with_the_row")
def test_a_new_row_is_in_the_file_the_queue_the_curves_and_the_metrics() -> None:
    report, line = step_report(3, kl_reference=0.25)
    assert line["kl_reference"] == line["policy"]["kl_reference"] == 0.25

    summary = json.loads(json.dumps(reported(line)))
    assert summary["kl_reference"] == 0.25
    for source in (line, summary):
        curves = Curves()
        curves.add_report(source)
        assert "kl_reference" in curves.answer([], 1).available
        (curve,) = curves.answer(["kl_reference"], 10).series
        assert (curve.unit, curve.axis, curve.x, curve.mean) == ("nats", "train_step", [3.0], [0.25])

    metrics = Metrics("trainer")
    TrainerMetrics(metrics).observe_step(report, line)
    text = generate_latest(metrics.registry).decode()
    assert "# HELP rollmesh_trainer_kl_reference_nats k3 KL(policy || reference) per token." in text
    assert metrics.registry.get_sample_value("rollmesh_trainer_kl_reference_nats", _labels(metrics)) == 0.25
    assert "| `rollmesh_trainer_kl_reference_nats` | gauge |" in metrics_document()


@pytest.mark.usefixtures("with_the_row")
def test_a_new_row_is_in_the_series_of_the_report(tmp_path: Path) -> None:
    folder = RecordedRun(make_run(tmp_path / "run", steps=6, kl_reference=0.25))
    assert train_series(folder.metrics.records)["kl_reference"].tolist() == [0.25] * 6


def test_no_name_is_used_twice() -> None:
    for names in ([m.field for m in STEP_METRICS], [m.gauge for m in STEP_METRICS], [m.curve for m in STEP_METRICS]):
        given = [name for name in names if name]
        assert len(given) == len(set(given))


def test_every_gauge_has_the_number_of_its_line() -> None:
    report, line = step_report(3)
    metrics = Metrics("trainer")
    TrainerMetrics(metrics).observe_step(report, line)
    for metric in step_metrics.gauges():
        found = metrics.registry.get_sample_value(f"rollmesh_trainer_{metric.gauge}", _labels(metrics))
        assert found == metric.value(line), metric.field


def _labels(metrics: Metrics) -> dict[str, str]:
    return next(dict(sample.labels) for sample in samples_of(metrics) if sample.name == "rollmesh_trainer_loss")


def samples_of(metrics: Metrics) -> list[Sample]:
    return [sample for family in metrics.registry.collect() for sample in family.samples]


def test_totals_of_domains_are_counted_from_the_first_step_on_for_at_most_64_domains() -> None:
    metrics = Metrics("trainer")
    counters = TrainerMetrics(metrics).domains
    before = {f"d{n:02}": DomainTotals(drawn=4, completed=16, solved=3, tokens=900) for n in range(70)}
    after = before | {"d01": DomainTotals(drawn=6, completed=24, solved=8, tokens=1500)}
    counters.observe(before)
    counters.observe(after)
    values = {
        s.name.removeprefix("rollmesh_trainer_domain_"): s.value
        for s in samples_of(metrics)
        if s.labels.get("domain") == "d01" and s.name.endswith("_total")
    }
    assert values == {"groups_total": 2, "trajectories_total": 8, "solved_trajectories_total": 5, "tokens_total": 600}
    shown = {sample.labels["domain"] for sample in samples_of(metrics) if "domain" in sample.labels}
    assert len(shown) == MOST_DOMAINS + 1 and "d69" not in shown and "other" in shown


def test_replayed_groups_and_their_staleness_are_counted_apart() -> None:
    report, line = step_report(3)
    metrics = Metrics("trainer")
    trainer = TrainerMetrics(metrics)
    older = SpreadStats(mean=2.5, max=3, histogram={2: 1, 3: 1})
    replayed = replace(report.batch, groups=2, trajectory_staleness=older)
    trainer.observe_step(replace(report, replay=replayed, replayed_share=0.25), line | {"replayed_share": 0.25})
    values = {s.name: s.value for s in samples_of(metrics)}
    assert values["rollmesh_trainer_replayed_groups_total"] == 2
    assert values["rollmesh_trainer_replayed_ratio"] == 0.25
    assert values["rollmesh_trainer_replayed_staleness_steps_count"] == 2
    assert values["rollmesh_trainer_replayed_staleness_steps_sum"] == 5
    assert values["rollmesh_trainer_staleness_steps_count"] == report.batch.trajectories
    assert values["rollmesh_trainer_trained_tokens_total"] == report.batch.trained_tokens


def test_tokens_out_of_the_loss_are_counted_by_mask_and_passes_by_trajectory() -> None:
    report, line = step_report(3)
    metrics = Metrics("trainer")
    trainer = TrainerMetrics(metrics)
    left_out = replace(report.batch, masked_tokens={"icepop": 5, "own": 2}, skipped_trajectories=4)
    for _ in range(2):
        trainer.observe_step(replace(report, batch=left_out, rate_factor=0.5), line | {"rate_factor": 0.5})
    samples = samples_of(metrics)
    masked = {s.labels["reason"]: s.value for s in samples if s.name == "rollmesh_trainer_masked_tokens_total"}
    assert {reason: count for reason, count in masked.items() if count} == {"icepop": 10, "own": 4}
    assert {"stale", *MASKS.methods} <= masked.keys()
    values = {s.name: s.value for s in samples}
    assert values["rollmesh_trainer_skipped_trajectories_total"] == 8
    assert values["rollmesh_trainer_learning_rate_factor_ratio"] == 0.5
