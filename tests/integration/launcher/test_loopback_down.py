"""A machine whose loopback interface is down: the console says that no service can be reached, and why."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

_CLONE_NEWNET = 0x40000000
_PROGRAM = """
import asyncio, sys
from pathlib import Path
from rollmesh.launcher.console_notes import ServiceWatch
from rollmesh.runtime.service_host import admin_server
from rollmesh.runtime.endpoints import published_endpoint
from rollmesh.runtime.health import Health
from rollmesh.runtime.metrics import Metrics
from rollmesh.runtime.endpoints import AdminClient, ServiceStates

async def main(folder):
    noted = asyncio.Event()
    def note(text):
        print(text, flush=True)
        noted.set()
    async with admin_server(Metrics("reward"), Health(), "127.0.0.1") as port, AdminClient() as client:
        with published_endpoint(folder, service="reward", index=0, grpc="", admin=f"127.0.0.1:{port}", starting=True):
            async with ServiceWatch(ServiceStates(folder, client), note).running(), asyncio.timeout(60):
                await noted.wait()

asyncio.run(main(Path(sys.argv[1])))
"""


def _leave_the_network() -> None:
    """Enter a network of its own, whose only interface, loopback, is down."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) != 0:
        os._exit(77)


def test_a_launcher_without_loopback_says_that_its_services_cannot_be_reached_and_why(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path)]
    done = subprocess.run(
        command, preexec_fn=_leave_the_network, capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode == 77:
        pytest.skip("no network namespaces here")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "waiting: reward-0: its admin port cannot be reached from here: Network is unreachable\n"
