"""The launcher waits an outage of Redis out, as the services do; its stops, and its end."""

import asyncio
import contextlib
import fcntl
import io
import os
import shutil
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
import structlog
import torch
from rich.console import Console
from structlog.testing import capture_logs

from rollmesh.checkpoints.bucket import open_checkpoints
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.config import RunConfig
from rollmesh.launcher.local_mesh import Interrupted, LocalMesh, local_mesh
from rollmesh.launcher.redis import embedded_server, running_store
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.launcher.run_up import _trained
from rollmesh.launcher.supervisor import ServiceSpec
from rollmesh.mesh import Cursor
from rollmesh.runtime.addresses import free_port
from rollmesh.store import EmbeddedServer, TrajectoryStore

from ...kit.records import policy_record


def config(folder: Path) -> RunConfig:
    return RunConfig.model_validate(
        {"name": "outage", "folder": str(folder), "model": {"path": "models/tiny"}, "trainer": {"train_steps": 1}}
    )


async def announce(store: TrajectoryStore, versions: range) -> None:
    """A trainer announces these policy versions, each after as many train steps."""
    session = await store.training.open_session("trainer")
    for version in versions:
        await store.policies.announce(session, policy_record(version))


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


STEPS = 2
TRAINER = """
import pathlib, sys, time
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.02)
"""


@contextlib.contextmanager
def no_room(server: EmbeddedServer) -> Iterator[None]:
    """A server that has died and cannot be started: its folder is not to be had."""
    away = server.folder.with_name("away")
    server.folder.rename(away)
    server.folder.write_text("not a folder")
    yield
    server.folder.unlink()
    away.rename(server.folder)


async def test_ctrl_c_does_not_wait_for_a_redis_that_does_not_answer(
    tmp_path: Path, own: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client itself would retry for minutes here."""
    leave_servers_alone(monkeypatch)
    shutdown, console = asyncio.Event(), Console(file=io.StringIO())
    async with local_mesh(config(tmp_path), RunFolder(tmp_path), shutdown, console) as mesh:
        async with retrying(mesh, own, 600.0):
            await asyncio.to_thread(own.kill)
            with no_room(own):
                asyncio.get_running_loop().call_later(0.3, shutdown.set)
                with pytest.raises(Interrupted, match="the newest version"):
                    await asyncio.wait_for(mesh.answer(mesh.latest_version, "the newest version"), 60)


async def test_a_launcher_whose_redis_is_not_there_yet_says_so_and_ends_at_once_when_it_is_stopped(
    tmp_path: Path,
) -> None:
    url = f"redis://127.0.0.1:{free_port()}"
    run = RunConfig.model_validate(config(tmp_path).model_dump() | {"store": {"url": url}})
    shutdown, out = asyncio.Event(), io.StringIO()
    opening = asyncio.ensure_future(local_mesh(run, RunFolder(tmp_path), shutdown, Console(file=out)).__aenter__())
    while "waiting for Redis: " not in out.getvalue():
        assert not opening.done(), opening.exception()
        await asyncio.sleep(0.01)
    shutdown.set()
    with pytest.raises(Interrupted, match="the store"):
        await asyncio.wait_for(opening, 10)


async def test_a_server_that_could_not_be_started_again_at_first_is_tried_further(tmp_path: Path) -> None:
    run, folder = config(tmp_path), RunFolder(tmp_path)
    async with running_store(run, folder) as running:
        server = embedded_server(run, folder)
        before = await running.store.recovery.server_run_id()
        await asyncio.to_thread(server.kill)
        with no_room(server), structlog.testing.capture_logs() as logs:
            async with asyncio.timeout(120):
                while not any(line["event"] == "embedded_redis_does_not_start" for line in logs):
                    await asyncio.sleep(0.05)
        assert await running.store.recovery.server_run_id() != before
    assert server.pid is None


async def test_a_timeline_that_cannot_be_written_is_said_once_and_ends_nothing(tmp_path: Path) -> None:
    """As on a full disk: the trainer waits for room, and so does the launcher."""
    run, folder, console = config(tmp_path), RunFolder(tmp_path), Console(file=io.StringIO())
    folder.timeline.mkdir()
    looks = 0

    async def room() -> bool:
        nonlocal looks
        looks += 1
        if looks == 3:
            folder.timeline.rmdir()
        return looks > 4

    async with local_mesh(run, folder, asyncio.Event(), console) as mesh:
        await mesh.until(room, "room")
    assert console.file.getvalue().count("waiting for the run folder, which cannot be written") == 1  # type: ignore[attr-defined]
    assert folder.timeline.read_text().count("\n") >= 1


async def announce_everything(store: TrajectoryStore) -> None:
    """Redis learns that every step is trained, committed and announced."""
    session = await store.training.open_session("trainer")
    policies = [policy_record(step) for step in range(STEPS + 1)]
    groups = [(step, [f"e0-{step}"]) for step in range(1, STEPS + 1)]
    await store.training.reassert(session, STEPS, STEPS, groups, policies, Cursor())


def save_state(checkpoints: CheckpointStore, train_step: int) -> Path:
    tensors = {"weight": torch.zeros(2)}
    return checkpoints.save_state(
        session=f"s{train_step}", train_step=train_step, rollback_count=0, tensors=tensors, extra={}
    ).folder


async def test_a_run_whose_newest_state_is_gone_is_not_over_before_the_state_is_on_disk(tmp_path: Path) -> None:
    run = RunConfig.model_validate(
        {"name": "closing", "folder": str(tmp_path), "model": {"path": "m"}, "trainer": {"train_steps": STEPS}}
    )
    checkpoints = open_checkpoints(run)
    save_state(checkpoints, 1)
    newest = save_state(checkpoints, STEPS)
    trainer = ServiceSpec(
        service="trainer",
        index=0,
        command=[sys.executable, "-c", TRAINER, str(tmp_path / "ends")],
        environment={},
        log_file=tmp_path / "trainer-0.log",
        one_shot=True,
    )
    async with local_mesh(run, RunFolder(tmp_path), asyncio.Event(), Console(file=io.StringIO())) as mesh:
        mesh.supervisor.start(trainer)
        try:
            assert not await _trained(mesh)
            await announce_everything(mesh.store)
            assert not await _trained(mesh), "the trainer still runs, and may yet end with an error"
            (tmp_path / "ends").touch()
            await mesh.until(lambda: _trained(mesh), "the end of the trainer", 120.0)
            shutil.rmtree(newest)
            assert not await _trained(mesh)
            save_state(checkpoints, STEPS)
            await mesh.until(lambda: _trained(mesh), "the end of the trainer", 120.0)
        finally:
            await mesh.supervisor.kill_all()
