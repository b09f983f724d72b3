"""Published speed-ups, their predictions, and the section of docs/simulator-published.md about them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.published.__main__ import app
from benchmarks.published.predictions import (
    Prediction,
    arm_settings,
    leave_one_out,
    log_error,
    ordered_pairs,
    predictions,
    times_of,
)
from benchmarks.published.section import fidelity_section, row_line, with_section
from benchmarks.published.speed_ups import PublishedSpeedUp, published_speed_ups
from rollmesh.errors import ConfigError

ROWS = published_speed_ups()
DOCUMENT = Path(__file__).parents[3] / "docs" / "simulator-published.md"


def row(name: str) -> PublishedSpeedUp:
    """The published row of this name."""
    (found,) = (each for each in ROWS if each.name == name)
    return found


def line_of(name: str) -> list[str]:
    """The cells of a row in the committed document."""
    (line,) = re.findall(rf"^\| {re.escape(name)} \|.*$", DOCUMENT.read_text(), re.MULTILINE)
    return [cell.strip() for cell in str(line).strip("|").split("|")]


def predicted(system: str, *figures: tuple[float, float]) -> list[Prediction]:
    """Predictions of the first rows of a system, with these simulated figures and those of leave one out."""
    members = [each for each in ROWS if each.system == system]
    return [
        Prediction(published=published, simulated=simulated, leave_one_out=other)
        for published, (simulated, other) in zip(members, figures, strict=False)
    ]


def test_the_figures_are_those_of_the_sources() -> None:
    systems = dict.fromkeys(each.system for each in ROWS)
    assert {system: [round(each.speed_up, 2) for each in ROWS if each.system == system] for system in systems} == {
        "CoPRIS": [1.58, 1.94, 1.75],
        "AReaL": [2.27, 2.77],
        "APRIL": [1.17, 1.21, 1.35, 1.26, 1.35, 1.44],
        "RollPacker": [1.30, 1.48, 2.21],
        "verl staleness": [1.30, 1.49, 1.49],
        "verl asynchronous": [2.66, 1.92, 2.35],
        "StreamRL": [1.55, 2.66],
        "RollArt": [2.05, 1.35, 1.31],
    }


@pytest.mark.parametrize("published", [each for each in ROWS if each.setup], ids=lambda each: each.name)
def test_both_arms_of_a_set_up_have_its_batch_and_as_many_gpus(published: PublishedSpeedUp) -> None:
    assert published.setup is not None
    method, baseline = (
        arm_settings(published.setup, arm) for arm in (published.setup.method, published.setup.baseline)
    )
    assert method.devices == baseline.devices
    assert method.prompts == baseline.prompts
    assert method.schedule.groups_per_batch == baseline.schedule.groups_per_batch == published.setup.groups_per_batch
    assert method.schedule.window_groups > baseline.schedule.window_groups


def test_a_method_has_as_many_passes_over_old_logprobs_as_its_baseline() -> None:
    # Left out: verl asynchronous, whose trainer takes the logprobs of its generators.
    for published in (each for each in ROWS if each.setup and each.system != "verl asynchronous"):
        assert published.setup is not None
        arms = (published.setup.method, published.setup.baseline)
        method, baseline = (arm_settings(published.setup, arm).trainer for arm in arms)
        assert method.evidence_passes == baseline.evidence_passes, published.name


def test_a_row_without_a_set_up_says_what_is_missing_and_is_not_predicted() -> None:
    unknown = [each for each in ROWS if each.setup is None]
    assert {each.system for each in unknown} == {"StreamRL", "RollArt"}
    assert all("not known" in each.remark for each in unknown)
    with pytest.raises(ConfigError, match="0 rows"):
        predictions(unknown)


def test_leave_one_out_predicts_the_geometric_mean_of_the_others() -> None:
    assert leave_one_out([1.0, 2.0, 8.0]) == pytest.approx([4.0, math.sqrt(8.0), math.sqrt(2.0)])
    with pytest.raises(ConfigError, match="1 rows"):
        leave_one_out([2.0])


def test_the_error_is_the_same_for_too_fast_and_too_slow() -> None:
    assert log_error(2.0, 4.0) == log_error(4.0, 2.0) == pytest.approx(math.log(2))
    assert log_error(1.5, 1.5) == 0.0


def test_pairs_are_ordered_by_what_is_published_and_ties_left_out() -> None:
    found = predicted("verl staleness", (1.2, 1.0), (1.1, 1.0), (1.3, 1.0))
    # 0.3 and 0.5 were published with almost the same time; 0.1 is below both, and simulated above 0.3.
    pairs = [
        (low.published.row, high.published.row, right) for low, high, right in ordered_pairs(found, "verl staleness")
    ]
    assert pairs == [("0.1", "0.3", False), ("0.1", "0.5", True)]


def test_the_section_has_means_orders_and_the_rows_that_are_not_predicted() -> None:
    found = predicted("RollPacker", (1.30 * math.e, 1.30), (1.48, 1.48), (2.21 / math.e, 2.21))
    section = fidelity_section(ROWS, found)
    assert "| **rows of the bar** | 3 | 0.667 | 0.000 |" in section
    assert "| all 3 | 0.667 | 0.311 |" in section
    assert "RollPacker: 0 of 3 pairs right; not: 7B, 8k below 14B, 16k" in section
    assert "| StreamRL, largest | the best compared system | notes | 2.66 |" in section
    assert all(row_line(each) in section for each in found)


def test_a_document_without_the_marks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"give docs/simulator-published.md"):
        with_section("# Another document", "tables")


@pytest.mark.parametrize("published", ROWS, ids=lambda each: each.name)
def test_the_document_has_every_published_row(published: PublishedSpeedUp) -> None:
    assert f"{published.speed_up:.2f}" in line_of(published.name)


def test_a_setting_that_is_no_time_of_all_rows_is_refused() -> None:
    for setting in ("gpu=H100", "switch_seconds=-1"):
        with pytest.raises(ConfigError, match=setting):
            times_of([setting])


def test_the_command_prints_the_predictions_that_the_document_has(monkeypatch: pytest.MonkeyPatch) -> None:
    # The two cheapest rows; the others take minutes: make sim-fidelity.
    cheap = (row("APRIL, 4B, DAPO-17k"), row("CoPRIS, R1-Distill-7B"))
    monkeypatch.setattr("benchmarks.published.__main__.published_speed_ups", lambda: cheap)
    result = CliRunner().invoke(app, ["speed-ups", "--json"])
    assert result.exit_code == 0, result.output
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [each["row"] for each in found] == [each.name for each in cheap]
    for each in found:
        committed = float(line_of(each["row"])[5])
        assert each["simulated"] == pytest.approx(committed, rel=0.02), "run: make sim-fidelity"


def test_a_time_is_changed_in_every_row() -> None:
    times = times_of(["switch_seconds=50", "seed=3"])
    for published in ROWS:
        if published.setup is not None and not published.setup.baseline.trainer_gpus:
            settings = arm_settings(published.setup, published.setup.baseline, times)
            assert settings.trainer.switch_seconds == 50
            assert settings.prompts.lengths.seed == 3
