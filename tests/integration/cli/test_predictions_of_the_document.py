"""The command behind docs/simulator.md prints what the document has."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from rollmesh.cli.main import app

from ...unit.sim.test_fidelity import line_of, row


def test_the_command_prints_the_predictions_that_the_document_has(monkeypatch: pytest.MonkeyPatch) -> None:
    # The two cheapest rows; the others take minutes: rollmesh fidelity-document docs/simulator.md.
    cheap = (row("APRIL, 4B, DAPO-17k"), row("CoPRIS, R1-Distill-7B"))
    monkeypatch.setattr("rollmesh.sim.published_speed_ups.published_speed_ups", lambda: cheap)
    result = CliRunner().invoke(app, ["sim", "--fidelity", "--json"])
    assert result.exit_code == 0, result.output
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [each["row"] for each in found] == [each.name for each in cheap]
    for each in found:
        committed = float(line_of(each["row"])[5])
        assert each["simulated"] == pytest.approx(committed, rel=0.02), (
            "run: rollmesh fidelity-document docs/simulator.md"
        )
