"""Published speed-ups and recommendations: their predictions, and the documents about them."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.published.__main__ import app
from benchmarks.published.pools import DOCUMENT, PLAIN_RATIO, POOL_RATIOS, SETUPS, SWITCHES, recommendation_document
from benchmarks.published.predictions import arm_settings
from benchmarks.published.speed_ups import PublishedSpeedUp, published_speed_ups
from rollmesh.sim.figures import figures

from ..sim.meshes import mesh_settings, run

ROWS = published_speed_ups()
SPEED_UPS_DOCUMENT = Path(__file__).parents[3] / "docs" / "simulator-published.md"


def row(name: str) -> PublishedSpeedUp:
    """The published row of this name."""
    (found,) = (each for each in ROWS if each.name == name)
    return found


def line_of(name: str) -> list[str]:
    """The cells of a row in the committed document."""
    (line,) = re.findall(rf"^\| {re.escape(name)} \|.*$", SPEED_UPS_DOCUMENT.read_text(), re.MULTILINE)
    return [cell.strip() for cell in str(line).strip("|").split("|")]


def test_the_figures_are_those_of_the_sources() -> None:
    systems = dict.fromkeys(each.system for each in ROWS)
    assert {system: [round(each.speed_up, 2) for each in ROWS if each.system == system] for system in systems} == {
        "CoPRIS": [1.58, 1.94, 1.75],
        "AReaL": [2.27, 2.77],
        "APRIL": [1.17, 1.21, 1.35, 1.26, 1.35, 1.44],
        "RollPacker": [1.30, 1.48, 2.21],
        "verl staleness": [1.30, 1.49, 1.49],
        "verl asynchronous": [2.66, 1.92, 2.35],
        "RhymeRL": [2.10, 2.60],
        "DAS": [2.00, 1.43, 1.33],
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
    assert method.schedule.window_groups > baseline.schedule.window_groups or method.fleet.drafts is not None


@pytest.mark.parametrize("published", ROWS, ids=lambda each: each.name)
def test_the_document_has_every_published_row(published: PublishedSpeedUp) -> None:
    assert f"{published.speed_up:.2f}" in line_of(published.name)


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


COMMITTED = Path(__file__).parents[3] / "docs" / DOCUMENT


def test_the_document_compares_each_row_with_the_plain_one():
    small, large = (figures(run(mesh_settings("copris", steps=4, pool_size=size))[1], 8) for size in (4, 24))
    rows = [f"{ratio:g}" for ratio in POOL_RATIOS] + list(SWITCHES)
    results = {(setup.title, row): [large if row == f"{PLAIN_RATIO:g}" else small] for setup in SETUPS for row in rows}
    gain = small.trained_tokens_per_second / large.trained_tokens_per_second - 1
    text = recommendation_document(results)
    assert text.count(f"| {gain:+.1%} |") == len(SETUPS) * len(SWITCHES)
    committed = COMMITTED.read_text()
    assert first_cells(text) == first_cells(committed), "run: make sim-recommend"
    assert text.partition("## Pools")[0] == committed.partition("## Pools")[0], "run: make sim-recommend"


def first_cells(text: str) -> list[str]:
    return [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]
