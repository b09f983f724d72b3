"""A trainer of two pods of which one is deleted: torchrun's real processes, one node per pod, on loopback addresses."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from ...kit.ledger import read_ledger
from ...kit.waiting import until
from .trainer_run import START_SECONDS, Runs

pytestmark = pytest.mark.long

RANK = """
import time, torch, torch.distributed as dist

dist.init_process_group("gloo")
print(f"rank {dist.get_rank()} of {dist.get_world_size()} trains", flush=True)
while True:
    dist.all_reduce(torch.ones(1))
    time.sleep(0.05)
"""


class Pods:
    """Two pods, which meet at the first one."""

    def __init__(self, folder: Path, *program: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        self._program = program
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    def start(self, pod: int) -> subprocess.Popen[bytes]:
        """Start a pod as the chart does; what it prints is added to its log."""
        flags = {
            "NNODES": "2",
            "NPROC_PER_NODE": "1",
            "RDZV_BACKEND": "c10d",
            "RDZV_ENDPOINT": f"127.0.0.1:{self.port}",
            "RDZV_CONF": f"is_host={pod == 0}",
            "LOCAL_ADDR": f"127.0.0.{pod + 1}",
            "RDZV_ID": "run",
            "MAX_RESTARTS": "3",
        }
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **{f"PET_{name}": value for name, value in flags.items()}}
        command = [sys.executable, "-P", "-m", "rollmesh.trainer.torchrun", "--no-python", sys.executable]
        with self.log_file(pod).open("ab") as log:
            process = subprocess.Popen([*command, *self._program], env=environment, stdout=log, stderr=log)
        self.processes.append(process)
        return process

    def log_file(self, pod: int) -> Path:
        return self.folder / f"pod-{pod}.log"

    def log(self, pod: int) -> str:
        return self.log_file(pod).read_text()

    def wait_for(self, pod: int, text: str, times: int = 1) -> None:
        until(lambda: self.log(pod).count(text) >= times, lambda: self.log(pod), START_SECONDS)

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                end(process, signal.SIGKILL)


def delete(pod: subprocess.Popen[bytes], number: signal.Signals = signal.SIGKILL) -> None:
    """End a pod by a signal to its first process, or all of it by SIGKILL."""
    assert end(pod, number) in (128 + signal.SIGTERM, -signal.SIGKILL)


def end(pod: subprocess.Popen[bytes], number: signal.Signals) -> int:
    """Send the signal of ``delete`` and return the exit status, which is the pod's own if it ended before."""
    ranks = psutil.Process(pod.pid).children(recursive=True)
    pod.send_signal(number)
    if number is signal.SIGKILL:
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.kill()
    return pod.wait(START_SECONDS)


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    (tmp_path / "rank.py").write_text(RANK)
    made = Pods(tmp_path, tmp_path / "rank.py")
    yield made
    made.kill()


@pytest.mark.parametrize("deleted", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_deleted_pod_is_the_only_one_that_ends_and_is_named_until_another_one_takes_its_place(
    pods: Pods, deleted: int, number: signal.Signals
) -> None:
    both = [pods.start(pod) for pod in (0, 1)]
    for pod in (0, 1):
        pods.wait_for(pod, f"rank {pod} of 2 trains")
    gone, other = both[deleted], 1 - deleted
    delete(gone, number)
    pods.wait_for(other, "torchrun: waiting for pod ")
    named = pods.log(other).rpartition("torchrun: waiting for pod ")[2]
    assert named.startswith("127.0.0.1, " if deleted == 0 else f"{socket.gethostname()} (127.0.0.2)")
    begun = time.monotonic()
    pods.start(deleted)
    for pod in (0, 1):
        pods.wait_for(pod, " of 2 trains", times=2)
    assert time.monotonic() - begun < 60
    assert both[other].poll() is None
    assert "DistStoreError" not in pods.log(0) + pods.log(1)


def test_a_pod_whose_first_one_comes_late_waits_for_it_and_names_it(pods: Pods) -> None:
    second = pods.start(1)
    pods.wait_for(1, "torchrun: waiting for pod 127.0.0.1, at which all pods meet")
    pods.start(0)
    for pod in (0, 1):
        pods.wait_for(pod, " of 2 trains")
    assert second.poll() is None


async def test_a_run_goes_on_with_the_pod_that_replaces_a_deleted_one(runs: Runs, tmp_path: Path) -> None:
    program = Path(__file__).with_name("trainer_process.py")
    pods = Pods(tmp_path, program, tmp_path / "run" / "run.yaml")

    try:
        async with runs() as run:
            run.process, second = pods.start(0), pods.start(1)
            (run.folder / "trainer.log").symlink_to(pods.log_file(0))
            async with run.fed(2):
                await run.until("version 2", lambda: '"policy_version": 2' in run.log(), START_SECONDS, pause=0.02)
                delete(second)
                await run.until("the wait", lambda: "torchrun: waiting for pod " in run.log(), pause=0.02)
                pods.start(1)
                await run.feed(2)
                await run.until_finished(START_SECONDS)
            assert read_ledger(run.checkpoints).groups == {s: run.cuts[s - 1] for s in range(1, 5)}
    finally:
        pods.kill()
