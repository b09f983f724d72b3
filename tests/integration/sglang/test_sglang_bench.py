"""The bench of the SGLang engine: every arm runs and is told apart. The figures are the bench's own business."""

import pytest

from benchmarks import sglang

pytestmark = pytest.mark.long


def test_every_arm_is_measured_beside_the_bare_server(monkeypatch, real):
    for name, value in real["environment"].items():
        monkeypatch.setenv(name, value)
    measures = {m.name: m for m in sglang.run(quick=True, python=real["python"])}
    rate = measures["tokens per second, 8 in flight, slices of 256"]
    assert rate.value > 0 and rate.baseline == "bare server" and rate.ratio is not None
    cost = measures["CPU per token, server and generator, 8 in flight, slices of 256"]
    assert cost.value > 0 and cost.baseline_value is not None and cost.baseline_value > 0
    first, continued = (measures[f"cached tokens, {name} (256)"] for name in ("first slices", "with continuing slices"))
    assert 0 <= first.value <= 1 and 0 < continued.value < 1
    pause = measures["pause of decoding, interrupt (retract)"]
    assert pause.value > 0 and pause.baseline_value is not None and pause.baseline_value > 0
