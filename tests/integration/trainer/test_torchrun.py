"""torchrun for the ranks of a trainer: the death of its launcher, and signals to it."""

import signal
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_torchrun_ends_with_the_status_of_the_signal_that_stopped_it_and_names_it_in_a_line(
    tmp_path: Path, number: signal.Signals
) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    command = [sys.executable, "-m", "rollmesh.trainer.torchrun", "--standalone", "--nproc-per-node", "1", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as torchrun:
        assert torchrun.stdout is not None
        _, rank = (psutil.Process(int(pid)) for pid in torchrun.stdout.readline().split())
        try:
            torchrun.send_signal(number)

            _, errors = torchrun.communicate(timeout=START_SECONDS)
            assert torchrun.returncode == 128 + number
            assert f"torchrun: stopped by {number.name}\n" in errors
            assert "SignalException" not in errors
        finally:
            torchrun.kill()
            if rank.is_running():
                rank.kill()
