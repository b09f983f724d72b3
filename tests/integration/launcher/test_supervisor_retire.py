"""Children that retire while the others run."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from rollmesh.launcher.supervisor import ServiceSpec, Supervisor

from ...kit.waiting import reached

_STAYS = "import signal; print('up'); signal.pause()"
_DRAINS = """
import signal
def leave(*_):
    print('draining')
    signal.sigwait([signal.SIGUSR1])
    print('drained')
    raise SystemExit(0)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
signal.signal(signal.SIGTERM, leave)
print('up')
signal.pause()
"""


def spec(folder: Path, index: int, script: str = _STAYS, grace_seconds: float = 3600.0) -> ServiceSpec:
    return ServiceSpec(
        service="worker",
        index=index,
        command=[sys.executable, "-u", "-c", script],
        environment={},
        log_file=folder / f"worker-{index}.log",
        grace_seconds=grace_seconds,
    )


def says(folder: Path, index: int, word: str, times: int = 1) -> bool:
    log = folder / f"worker-{index}.log"
    return log.exists() and log.read_text().count(word) >= times


async def test_a_retired_child_is_forgotten_and_not_restarted_while_the_others_stay(tmp_path: Path) -> None:
    supervisor = Supervisor(restart_limit=0)
    for index in range(2):
        supervisor.start(spec(tmp_path, index))
    await reached(lambda: says(tmp_path, 0, "up") and says(tmp_path, 1, "up"))
    await supervisor.retire("worker-1")
    assert supervisor.indexes("worker") == ([0], [])
    assert supervisor.pid("worker-0") is not None
    assert supervisor.restart_counts() == {"worker-0": 0}
    assert not supervisor.failed.done()
    supervisor.start(spec(tmp_path, 1))
    await reached(lambda: says(tmp_path, 1, "up", times=2))
    await supervisor.stop(["worker"])


async def test_a_child_that_is_retired_before_its_process_exists_never_comes_up(tmp_path: Path) -> None:
    supervisor = Supervisor(restart_limit=0)
    supervisor.start(spec(tmp_path, 0))
    await supervisor.retire("worker-0")
    assert supervisor.indexes("worker") == ([], [])
    assert not says(tmp_path, 0, "up")
    await supervisor.kill_all()


async def test_an_orderly_stop_waits_for_a_child_that_is_being_retired(tmp_path: Path) -> None:
    supervisor = Supervisor(restart_limit=0)
    supervisor.start(spec(tmp_path, 0, _DRAINS))
    await reached(lambda: says(tmp_path, 0, "up"))
    pid = supervisor.pid("worker-0")
    assert pid is not None
    retirement = supervisor.retire("worker-0")
    assert supervisor.retire("worker-0") is retirement
    await reached(lambda: says(tmp_path, 0, "draining"))
    stop = asyncio.ensure_future(supervisor.stop(["worker"]))
    await asyncio.sleep(0)
    assert not stop.done() and supervisor.indexes("worker") == ([0], [0])
    os.kill(pid, signal.SIGUSR1)
    await asyncio.wait_for(stop, 60)
    assert says(tmp_path, 0, "drained")
    assert supervisor.indexes("worker") == ([], [])


async def test_killing_everything_ends_a_retirement_too(tmp_path: Path) -> None:
    supervisor = Supervisor(restart_limit=0)
    supervisor.start(spec(tmp_path, 0, _DRAINS))
    await reached(lambda: says(tmp_path, 0, "up"))
    retirement = supervisor.retire("worker-0")
    await reached(lambda: says(tmp_path, 0, "draining"))
    await asyncio.wait_for(supervisor.kill_all(), 60)
    assert retirement.done() and not says(tmp_path, 0, "drained")
