"""The bench of the scheduler runs every preset; its bars are for an idle machine, so they are not checked here."""

from __future__ import annotations

import pytest

from benchmarks.schedules import run

pytestmark = pytest.mark.long


def test_the_bench_measures_decisions_choices_and_views_with_their_bars() -> None:
    measures = {m.name.partition(": ")[0]: m for m in run(quick=True)}
    decisions = [measures[f"decide without a cut, B = {batch}"] for batch in ("16", "512", "2,048")]
    decisions.append(measures["decide with pool_size auto, B = 16"])
    choices = [measures[f"choice of a generator among 1,000 by {placement}"] for placement in ("calls", "tokens")]
    cut = measures["cut, B = 2,048"]
    assert {(str(bar), m.unit) for m in (*decisions, *choices) for bar in m.bars} == {("value <= 20", "us")}
    assert ([str(bar) for bar in cut.bars], cut.unit) == (["value <= 5"], "ms")
    assert all(m.value > 0 for m in measures.values())
    payload = measures["view of 2,048 open groups without single groups, payload"]
    assert payload.baseline == "with single groups" and payload.baseline_value is not None
    # A group's row has an id, an index and a step: at least a dozen bytes each.
    assert payload.baseline_value > 12 * 2048 > payload.value
