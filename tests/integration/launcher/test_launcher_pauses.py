"""Pauses of a run, by its launcher or by an operator; and its end, good only if a generator serves the last policy."""

import asyncio
import io
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rollmesh.errors import PoliciesRefused, RollmeshError
from rollmesh.gateway.curves import Curves
from rollmesh.gateway.mesh_snapshot import build_overview, read_snapshot
from rollmesh.gateway.models.live import Overview, Rates
from rollmesh.launcher.evaluations import evaluate_version
from rollmesh.launcher.local_mesh import LocalMesh, local_mesh
from rollmesh.launcher.redis import running_store
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.launcher.supervisor import ServiceFailed, ServiceSpec
from rollmesh.scheduling import Schedule

from ...kit.records import generator_record
from .test_launcher_outages import announce, config


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


NEWEST = 2


def generator(folder: Path, index: int) -> ServiceSpec:
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    log = folder / f"generator-{index}.log"
    return ServiceSpec(service="generator", index=index, command=command, environment={}, log_file=log)


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[LocalMesh]:
    """A run that has announced versions 0 to 2, and has one generator process."""
    async with local_mesh(config(tmp_path), RunFolder(tmp_path), asyncio.Event(), Console(file=io.StringIO())) as mesh:
        await announce(mesh.store, range(NEWEST + 1))
        mesh.supervisor.start(generator(tmp_path, 0))
        yield mesh
        await mesh.supervisor.kill_all()


async def register(
    mesh: LocalMesh, served: int, refused: int | None = None, count: int = 0, *, serving: bool = True
) -> None:
    await mesh.store.generators.register(
        generator_record(
            "generator-0",
            policy_version=served,
            slot_count=4,
            serving=serving,
            refused_version=refused,
            refused_count=count,
            refused_reason="canary: nan",
        ),
        60.0,
    )


async def waiting(work: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
    """The work as a task that has not ended within a second."""
    task = asyncio.create_task(work)
    await asyncio.wait({task}, timeout=1.0)
    assert not task.done()
    return task


@pytest.mark.parametrize(
    ("refused", "count"), [(None, 0), (NEWEST - 1, 1), (NEWEST, 0)], ids=["untried", "refused before", "retried"]
)
async def test_a_last_version_that_no_generator_has_tried_yet_ends_no_run_and_is_waited_for(
    mesh: LocalMesh, refused: int | None, count: int
) -> None:
    await register(mesh, 0, refused, count)
    end = await waiting(mesh.until_newest_served())
    await register(mesh, NEWEST)
    await asyncio.wait_for(end, 60)


async def test_a_last_version_that_every_generator_has_tried_and_refuses_ends_the_run_with_a_typed_error(
    mesh: LocalMesh,
) -> None:
    await register(mesh, 0)
    end = asyncio.create_task(mesh.until_newest_served())
    await asyncio.wait({end}, timeout=1.0)
    await register(mesh, 0, NEWEST, 1)
    with pytest.raises(PoliciesRefused, match="refuses the newest policy version, 2: canary: nan") as ended:
        await asyncio.wait_for(end, 60)
    assert ended.value.final


async def test_a_run_whose_operator_pinned_an_older_version_does_not_wait_for_the_newest(mesh: LocalMesh) -> None:
    await register(mesh, 0)
    await mesh.store.policies.pin(0)
    await asyncio.wait_for(mesh.until_newest_served(), 60)


async def test_a_run_that_continues_without_generators_does_not_wait_for_one(mesh: LocalMesh) -> None:
    """An operator has scaled it to ``generator=0``, and may scale it up again while it is in progress."""
    start = await waiting(mesh.until_serving())
    await mesh.supervisor.retire("generator-0")
    await asyncio.wait_for(start, 60)


async def test_a_run_scaled_to_no_generators_keeps_its_evaluation_until_one_serves(mesh: LocalMesh) -> None:
    """Without a generator the evaluation would end without a score, and no later start would repeat it."""
    await mesh.supervisor.retire("generator-0")
    evaluation = await waiting(evaluate_version(mesh, NEWEST))
    assert await mesh.store.evaluations.all() == []
    await register(mesh, NEWEST)
    async with asyncio.timeout(60):
        while not await mesh.store.evaluations.all():
            await asyncio.sleep(0.01)
    evaluation.cancel()
    await asyncio.wait({evaluation})


async def test_a_start_whose_every_generator_refuses_the_policy_ends_at_once_with_the_reason(mesh: LocalMesh) -> None:
    start = await waiting(mesh.until_serving())
    await register(mesh, -1, NEWEST, 1, serving=False)
    with pytest.raises(PoliciesRefused, match="refuses policy version 2, and none serves an older one: canary: nan"):
        await asyncio.wait_for(start, 60)


async def test_a_start_waits_for_generators_that_have_not_tried_the_policy_yet(mesh: LocalMesh, tmp_path: Path) -> None:
    mesh.supervisor.start(generator(tmp_path, 1))
    await register(mesh, -1, NEWEST, 1, serving=False)
    start = await waiting(mesh.until_serving())
    await register(mesh, NEWEST)
    await asyncio.wait_for(start, 60)
