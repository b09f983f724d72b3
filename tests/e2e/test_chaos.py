"""Three rounds of the chaos bench: a run survives each fault with nothing lost and nothing trained twice."""

from pathlib import Path

import pytest

from rollmesh.report.console import output_console

from ..chaos.chaos import run_rounds

pytestmark = [pytest.mark.long, pytest.mark.slow]


@pytest.mark.timeout(4200)
def test_a_run_survives_kills_a_cut_log_and_loses_or_repeats_nothing(tmp_path: Path) -> None:
    rounds = run_rounds(3, output_console(), tmp_path)
    assert all(r.injected for r in rounds)
    assert [r.output for r in rounds if not r.passed] == []
    assert sum(r.lost for r in rounds) == 0
    assert sum(r.trained_twice for r in rounds) == 0
    assert sum(r.staleness_violations for r in rounds) == 0
