"""torchrun for the ranks of a trainer, below a launcher that is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from .trainer_run import START_SECONDS

LAUNCHER = """
import os, subprocess, sys

torchrun = ["-m", "rollmesh.trainer.torchrun", "--standalone", "--nproc-per-node", "1"]
subprocess.run([sys.executable, *torchrun, sys.argv[1], "--index", "0", "--supervised-by", str(os.getpid())])
"""
RANK = "import os, signal; print(os.getppid(), os.getpid(), flush=True); signal.pause()"


@pytest.mark.skipif(sys.platform != "linux", reason="parent death signals are Linux's")
def test_torchrun_and_its_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    rank = tmp_path / "rank.py"
    rank.write_text(RANK)
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as launcher:
        assert launcher.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in launcher.stdout.readline().split()]
        launcher.kill()
        try:
            assert len(processes) == 2
            _, alive = psutil.wait_procs(processes, timeout=START_SECONDS)
            assert not alive
        finally:
            for process in processes:
                if process.is_running():
                    process.kill()
