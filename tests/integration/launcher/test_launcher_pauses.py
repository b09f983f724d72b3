"""Pauses of a run, by its launcher for an evaluation or by an operator."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from rich.console import Console

from rollmesh.errors import RollmeshError
from rollmesh.gateway.curves import Curves
from rollmesh.gateway.mesh_snapshot import build_overview, read_snapshot
from rollmesh.gateway.models.live import Overview, Rates
from rollmesh.launcher.local_mesh import LocalMesh, local_mesh
from rollmesh.launcher.redis import running_store
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.launcher.supervisor import ServiceFailed
from rollmesh.scheduling import Schedule

from .test_launcher_outages import announce, config


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[LocalMesh]:
    async with local_mesh(config(tmp_path), RunFolder(tmp_path), asyncio.Event(), Console(file=io.StringIO())) as mesh:
        await announce(mesh.store, range(1))
        yield mesh


async def overview(mesh: LocalMesh) -> Overview:
    return build_overview(
        await read_snapshot(mesh.store),
        run=mesh.config.name,
        schedule=Schedule.from_config(mesh.config),
        rates=Rates(),
        curves=Curves(),
        evaluations=[],
        running={},
    )


async def test_the_page_does_not_say_that_an_operator_paused_the_run_while_the_launcher_evaluates(
    mesh: LocalMesh,
) -> None:
    await mesh.pause(True)
    shown = await overview(mesh)
    assert shown.state == "paused"
    assert not shown.paused_by_person
    assert "launcher" in shown.waiting_for
    assert shown.paused_by == ("launcher",)
    await mesh.pause(False)
    shown = await overview(mesh)
    assert (shown.state, shown.paused_by) == ("running", ())


async def test_a_launcher_that_starts_again_does_not_end_an_operators_pause(mesh: LocalMesh) -> None:
    await mesh.store.settings.set_user_paused(True)
    await mesh.pause(True)
    await mesh.pause(False)  # as before and after the first evaluation of a start
    assert (await mesh.store.mesh.view()).user_paused
    shown = await overview(mesh)
    assert shown.paused_by_person
    assert shown.paused_by == ("operator",)


async def wait_for_the_user(shutdown: asyncio.Event, mesh: LocalMesh) -> None:
    async def never() -> bool:
        shutdown.set()
        return False

    await mesh.until(never, "the user")


async def fail_to_evaluate(_: asyncio.Event, mesh: LocalMesh) -> None:
    await mesh.until_idle()
    raise ServiceFailed("rollout-0 has exited too often")


async def be_cancelled(_: asyncio.Event, mesh: LocalMesh) -> None:
    await mesh.until_idle()
    raise asyncio.CancelledError


@pytest.mark.parametrize("end", [wait_for_the_user, fail_to_evaluate, be_cancelled])
async def test_the_pause_of_a_launcher_ends_with_it_and_that_of_an_operator_remains(
    tmp_path: Path, end: Callable[[asyncio.Event, LocalMesh], Awaitable[None]]
) -> None:
    """Services that are started one by one would wait for a launcher that is gone, for ever."""
    run, folder, shutdown = config(tmp_path), RunFolder(tmp_path), asyncio.Event()
    with pytest.raises((RollmeshError, asyncio.CancelledError)):
        async with local_mesh(run, folder, shutdown, Console(file=io.StringIO())) as mesh:
            await mesh.store.settings.set_user_paused(True)
            await mesh.pause(True)
            await end(shutdown, mesh)
    async with running_store(run, folder) as running:
        view = await running.store.mesh.view()
    assert (view.launcher_paused, view.user_paused) == (False, True)


async def test_a_launcher_ends_no_pause_that_another_one_has_set(tmp_path: Path) -> None:
    run, folder = config(tmp_path), RunFolder(tmp_path)
    async with running_store(run, folder) as running:
        async with local_mesh(run, folder, asyncio.Event(), Console(file=io.StringIO())):
            await running.store.settings.set_launcher_paused(True)
    async with running_store(run, folder) as running:
        assert (await running.store.mesh.view()).launcher_paused
