"""What a service waits for is said by the console, by ``rollmesh status`` and by the page, with the last error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollmesh.cli.main import app
from rollmesh.config import write_run_config
from rollmesh.gateway.events import GatewayMetrics
from rollmesh.gateway.mesh_poller import MeshPoller
from rollmesh.launcher.console_notes import ServiceWatch
from rollmesh.runtime.endpoints import AdminClient, ServiceStates
from rollmesh.runtime.health import Health
from rollmesh.runtime.metrics import Metrics

from ...kit.s3_server import Bucket
from .test_full_disk import fill
from .trainer_run import Runs, TrainerRun

pytestmark = pytest.mark.slow


async def assert_shown(run: TrainerRun, reason: str) -> None:
    """Wait until console, page and status show a reason of the trainer."""
    notes: list[str] = []
    async with AdminClient() as client:
        states = ServiceStates(run.folder, client)
        watch = ServiceWatch(states, notes.append)
        async with watch.running():
            await run.until("a note of the console", lambda: any(reason in note for note in notes), pause=0.02)
            assert f"trainer-0: {watch.text().partition(': ')[2]}" == watch.text()
            poller = MeshPoller(run.store, run.config, GatewayMetrics(Metrics("gateway")), Health(), states)
            await poller.step()
            assert reason in poller.overview().waiting_for
    assert reason in await run.store.training.waits(), "for a page that shares no run folder with the trainer"
    write_run_config(run.config, run.folder / "config.yaml")
    for arguments in ([], ["--json"]):
        done = await asyncio.to_thread(CliRunner().invoke, app, ["status", str(run.folder), *arguments])
        assert done.exit_code == 0, done.output
        assert reason in " ".join(done.stdout.split())
    assert reason in json.loads(done.stdout)["waits"]["trainer-0"]


async def test_checkpoints_on_a_full_disk_of_their_own(
    runs: Runs, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    fill(small_disk / "filler")
    async with runs(checkpoints={"folder": str(small_disk / "checkpoints")}) as run:
        run.start()
        await assert_shown(run, "disk full")


@asynccontextmanager
async def run_in_bucket(runs: Runs, fault: str) -> AsyncIterator[TrainerRun]:
    """A run whose trainer is started, with its checkpoints in a bucket that has a fault."""
    bucket = Bucket(runs.folder / "s3.log", fault)
    try:
        section = bucket.section("runs/x").model_dump(include={"folder", "object_store"})
        async with runs(checkpoints=section) as run:
            run.start()
            yield run
    finally:
        bucket.stop()


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ACCESS_KEY_ID", "nobody"), ("SECRET_ACCESS_KEY", "secret"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)


async def test_an_object_store_that_fails(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    async with run_in_bucket(runs, "outage") as run:
        await assert_shown(run, "this server refuses")
