"""Bad rows and settings that a service finds end in a clear error; more in tests/integration/cli."""

import json
from pathlib import Path

import pytest

from rollmesh.runtime.lifecycle import EXIT_CONFIG

from .conftest import write_small_run

pytestmark = pytest.mark.slow


def test_a_service_that_cannot_start_says_so_with_a_status_of_its_own(tmp_path: Path) -> None:
    line = write_small_run(tmp_path, reward={"options": {"strictness": 3}})
    done = line.run("reward", str(line.run_file))
    assert done.returncode == EXIT_CONFIG, done.stderr
    assert "reward.options: countdown got an unexpected keyword" in json.loads(done.stderr.splitlines()[-1])["message"]
