"""Two rounds of the chaos bench: a run survives each fault with nothing lost and nothing trained twice.

``make chaos`` runs all faults. A killed generator, a killed worker and a stalled one are in tests/integration/rollout:
token for token, without a whole mesh.
"""

from pathlib import Path

import pytest

from rollmesh.bench.chaos import run_rounds
from rollmesh.bench.faults import faults_named
from rollmesh.report.console import output_console

pytestmark = pytest.mark.slow

FAULTS = ("kill -9 trainer between state and publication", "kill -9 redis, cut 4 KiB of its AOF")


@pytest.mark.timeout(1500)
def test_a_run_survives_kills_a_cut_log_and_loses_or_repeats_nothing(tmp_path: Path) -> None:
    faults = [fault for name in FAULTS for fault in faults_named(name)]
    rounds = run_rounds(len(FAULTS), output_console(), tmp_path, faults)
    assert [r.fault for r in rounds] == list(FAULTS)
    assert all(r.injected for r in rounds)
    assert [r.output for r in rounds if not r.passed] == []
    assert sum(r.lost for r in rounds) == 0
    assert sum(r.trained_twice for r in rounds) == 0
    assert sum(r.staleness_violations for r in rounds) == 0
