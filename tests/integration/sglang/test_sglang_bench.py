"""The bench of the SGLang engine, before the stand-in: every arm and every mode runs and is told apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh.bench import sglang

_FAKES = Path(__file__).parents[2] / "fakes"


@pytest.mark.timeout(240)
def test_every_arm_is_measured_beside_the_bare_server(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(_FAKES))  # the server is found there: same interpreter, another program
    measures = {m.name: m for m in sglang.run(quick=True)}
    rate = measures["tokens per second, 32 in flight, slices of 256"]
    assert rate.value > 0 and rate.baseline == "bare server" and rate.ratio is not None
    cost = measures["CPU per token, server and generator, 32 in flight, slices of 256"]
    assert cost.value > 0 and cost.baseline_value is not None and cost.baseline_value > 0
    first, continued = (measures[f"cached tokens, {name} (256)"] for name in ("first slices", "with continuing slices"))
    assert 0 <= first.value <= 1 and 0 < continued.value < 1
    pause = measures["pause of decoding, interrupt (retract)"]
    assert pause.value > 0 and pause.baseline_value is not None and pause.baseline_value > 0
