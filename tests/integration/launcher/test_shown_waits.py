"""A launcher and a status that wait for Redis say why, and a run that waits for an operator's pin says which."""

import asyncio
import io
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import redis
from rich.console import Console
from typer.testing import CliRunner

from rollmesh.cli.main import app
from rollmesh.config import RunConfig, write_run_config
from rollmesh.launcher.local_mesh import local_mesh
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.runtime.health import Waits
from rollmesh.scheduling import run_limits
from rollmesh.store import EmbeddedServer, TrajectoryStore
from rollmesh.store.evaluation_requests import evaluation_request
from rollmesh.worker.evaluation_pin import Pin
from rollmesh.worker.generator_pool import GeneratorPool

from .test_launcher_outages import announce, config

REFUSAL = re.compile("max number of clients reached|at its maxclients")
"""The server's own message, unless it closes the connection before the client reads that."""


@asynccontextmanager
async def full_of_clients(tmp_path: Path) -> AsyncIterator[tuple[RunConfig, Callable[[], None]]]:
    """A run with a Redis of its own that takes no further client, until the function is called."""
    server = EmbeddedServer(tmp_path / "redis")
    await asyncio.to_thread(server.start)
    run = RunConfig.model_validate(config(tmp_path).model_dump() | {"store": {"url": server.url}})
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxclients", 1)
        try:
            yield run, lambda: client.config_set("maxclients", 1000)
        finally:
            client.close()
            await asyncio.to_thread(server.kill)


async def test_a_launcher_whose_redis_takes_no_further_client_says_so_while_it_waits(tmp_path: Path) -> None:
    out = io.StringIO()
    async with full_of_clients(tmp_path) as (run, end):
        mesh = local_mesh(run, RunFolder(tmp_path), asyncio.Event(), Console(file=out))
        opening = asyncio.ensure_future(mesh.__aenter__())
        while not ("waiting for Redis: " in out.getvalue() and REFUSAL.search(out.getvalue())):
            assert not opening.done(), opening.exception()
            await asyncio.sleep(0.01)
        end()
        await opening
        await mesh.__aexit__(None, None, None)


async def test_a_status_whose_redis_takes_no_further_client_says_so_within_seconds(tmp_path: Path) -> None:
    async with full_of_clients(tmp_path) as (run, _):
        write_run_config(run, tmp_path / "config.yaml")
        begin = time.monotonic()
        done = await asyncio.to_thread(CliRunner().invoke, app, ["status", str(tmp_path)])
    assert done.exit_code == 2 and REFUSAL.search(done.stderr)
    assert time.monotonic() - begin < 15, "the launcher's own calls wait for 20 s"


async def test_an_evaluation_that_waits_for_the_pin_of_an_operator_says_how_to_release_it(tmp_path: Path) -> None:
    run, waits = config(tmp_path), Waits()
    server = EmbeddedServer(tmp_path / "redis")
    await asyncio.to_thread(server.start)
    try:
        async with await TrajectoryStore.connect(run.store, run.name, server.url) as store:
            await store.limits.init_run(run_limits(run))
            await announce(store, range(2))
            await store.settings.set_user_paused(True)
            await store.policies.pin(0)
            pin = Pin(store, GeneratorPool(store.generators), evaluation_request(run.evaluation, 1), waits)
            held = pin.held()
            holding = asyncio.ensure_future(held.__aenter__())
            while not waits.text():
                assert not holding.done()
                await asyncio.sleep(0.01)
            assert "the evaluation of policy version 1" in waits.text()
            assert "policy version 0 is pinned by an operator; rollmesh pin RUN --release" in waits.text()
            await store.policies.pin(None)
            assert await holding
            assert waits.text() == ""
            await held.__aexit__(None, None, None)
    finally:
        await asyncio.to_thread(server.kill)
