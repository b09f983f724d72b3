"""The launcher waits an outage of Redis out, as the services do."""

import asyncio
import contextlib
import fcntl
import io
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from structlog.testing import capture_logs

from rollmesh.config import RunConfig
from rollmesh.launcher.local_mesh import LocalMesh, local_mesh
from rollmesh.launcher.redis import embedded_server, running_store
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.store import EmbeddedServer, TrajectoryStore
from rollmesh.types import PolicyRecord


def config(folder: Path) -> RunConfig:
    return RunConfig.model_validate(
        {"name": "outage", "folder": str(folder), "model": {"path": "models/tiny"}, "trainer": {"train_steps": 1}}
    )


async def announce(store: TrajectoryStore, versions: range) -> None:
    """A trainer announces these policy versions, each after as many train steps."""
    session = await store.training.open_session("trainer")
    for v in versions:
        record = PolicyRecord(policy_version=v, train_step=v, path=f"{v}-x", manifest_digest="ab" * 32)
        await store.policies.announce(session, record)


def leave_servers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher would start a server again that a test has killed, at a moment that the test does not choose."""
    monkeypatch.setattr("rollmesh.launcher.redis._WATCH_SECONDS", 3600.0)


@contextlib.asynccontextmanager
async def retrying(mesh: LocalMesh, server: EmbeddedServer, seconds: float) -> AsyncIterator[None]:
    """The mesh has a client of the server that retries for so long."""
    await mesh.store.aclose()
    config = mesh.config
    mesh.store = await TrajectoryStore.connect(config.store, run=config.name, url=server.url, retry_seconds=seconds)
    yield
    await mesh.store.aclose()


def kill_and_hold_back(server: EmbeddedServer) -> int:
    """A descriptor that holds the dead server's lock, as its last threads would: until it is closed no other starts."""
    lock = os.open(server.folder / "lock", os.O_WRONLY)
    while True:
        server.kill()
        with contextlib.suppress(BlockingIOError):  # a successor was faster
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock


async def test_waiting_continues_through_an_outage_of_redis(
    tmp_path: Path, own: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's own timeout (20 s) is shorter than an outage may be."""
    leave_servers_alone(monkeypatch)
    console, looks = Console(file=io.StringIO()), 0
    async with local_mesh(config(tmp_path), RunFolder(tmp_path), asyncio.Event(), console) as mesh:
        async with retrying(mesh, own, 0.1):
            await asyncio.to_thread(own.kill)

            async def answered() -> bool:
                nonlocal looks
                looks += 1
                if "waiting for Redis" in console.file.getvalue():  # type: ignore[attr-defined]
                    await asyncio.to_thread(own.start)
                await mesh.store.mesh.view()
                return True

            await mesh.until(answered, "an answer", deadline_seconds=120.0)
    assert looks >= 2


async def test_a_server_that_a_killed_launcher_left_behind_is_kept_up_and_stopped_at_the_end(
    tmp_path: Path, own: EmbeddedServer
) -> None:
    async with running_store(config(tmp_path), RunFolder(tmp_path), owner=True) as running:
        before = await running.store.recovery.server_run_id()
        await asyncio.to_thread(own.kill)
        assert await running.store.recovery.server_run_id() != before
    assert own.pid is None


async def test_the_end_waits_for_a_server_that_is_being_started_again_and_stops_it(tmp_path: Path) -> None:
    run, folder = config(tmp_path), RunFolder(tmp_path)
    server = embedded_server(run, folder)
    with capture_logs() as lines:
        async with running_store(run, folder):
            release = threading.Timer(4.0, os.close, [await asyncio.to_thread(kill_and_hold_back, server)])
            lines.clear()
            async with asyncio.timeout(60):
                while not any(line["event"] == "embedded_redis_gone" for line in lines):
                    await asyncio.sleep(0.01)
            release.start()
        waited = release.finished.is_set()
        release.join()
    assert waited
    assert server.pid is None


async def test_a_command_that_only_reads_does_not_stop_the_server_of_a_run(tmp_path: Path, own: EmbeddedServer) -> None:
    pid = own.pid
    async with running_store(config(tmp_path), RunFolder(tmp_path)) as running:
        await running.store.recovery.server_run_id()
    assert pid is not None
    assert own.pid == pid


def test_a_server_that_another_process_has_stopped_is_collected(tmp_path: Path) -> None:
    run, folder = config(tmp_path), RunFolder(tmp_path)
    server, other = embedded_server(run, folder), embedded_server(run, folder)
    server.start()
    pid = server.pid
    other.stop()
    server.stop()
    assert pid is not None and not psutil.pid_exists(pid), "not even as a zombie"
