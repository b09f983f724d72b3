"""Bad rows and settings that a service finds end in a clear error; more in tests/integration/cli."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollmesh.preflight.trial import FIRST_ROWS
from rollmesh.runtime.lifecycle import EXIT_CONFIG

from .conftest import write_small_run

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_a_bad_row_after_the_first_ones_ends_the_run_at_once_and_the_error_names_its_line(tmp_path: Path) -> None:
    good = [{"prompt": f"{a} {b} 5 > 7 :", "answer": "7"} for a in range(1, 10) for b in range(1, 10)]
    rows = [*(good * (1 + FIRST_ROWS // len(good))), {"question": "1 2 5 > 7 :", "answer": "7"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = write_small_run(
        tmp_path,
        data={"source": {"type": "jsonl", "path": "rows.jsonl"}},
        reward={"verifier": "exact"},
        generator={"replicas": 1},
        evaluation={"before_and_after": False},
    )
    done = line.run("up", str(line.run_file))
    assert done.returncode == 2, done.stdout
    assert f"rows.jsonl:{len(rows)}: field 'prompt' is missing; the row has question, answer" in done.stderr
    assert str(line.folder / "logs" / "rollout-0.log") in done.stderr
    assert "Traceback" not in done.stderr


def test_a_service_that_cannot_start_says_so_with_a_status_of_its_own(tmp_path: Path) -> None:
    line = write_small_run(tmp_path, reward={"options": {"strictness": 3}})
    done = line.run("reward", str(line.run_file))
    assert done.returncode == EXIT_CONFIG, done.stderr
    assert "reward.options: countdown got an unexpected keyword" in json.loads(done.stderr.splitlines()[-1])["message"]
