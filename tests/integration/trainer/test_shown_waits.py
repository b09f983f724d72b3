"""What a service waits for is said by the console, by ``rollmesh status`` and by the page, with the last error."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollmesh.cli.main import app
from rollmesh.config import RunConfig, write_run_config
from rollmesh.gateway.gateway_metrics import GatewayMetrics
from rollmesh.gateway.mesh_poller import MeshPoller
from rollmesh.launcher.console_notes import ServiceWatch
from rollmesh.runtime.endpoints import AdminClient, ServiceStates
from rollmesh.runtime.health import Health
from rollmesh.runtime.metrics import Metrics
from rollmesh.store import EmbeddedServer

from ...kit.s3_server import Bucket
from .test_full_disk import fill
from .trainer_run import TrainerRun, opened_run, write_run_file

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
    tmp_path: Path, tiny_model: Path, server: EmbeddedServer, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    config = write_run_file(
        tmp_path / "run", tiny_model, server, checkpoints={"folder": str(small_disk / "checkpoints")}
    )
    fill(small_disk / "filler")
    async with opened_run(config) as run:
        run.start()
        await assert_shown(run, "disk full")


def in_bucket(folder: Path, model: Path, server: EmbeddedServer, bucket: Bucket) -> RunConfig:
    section = bucket.section("runs/x").model_dump(include={"folder", "object_store"})
    return write_run_file(folder, model, server, checkpoints=section)


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ACCESS_KEY_ID", "nobody"), ("SECRET_ACCESS_KEY", "secret"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)


async def test_an_object_store_that_fails(
    tmp_path: Path, tiny_model: Path, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    bucket = Bucket(tmp_path / "s3.log", "outage")
    try:
        async with opened_run(in_bucket(tmp_path / "run", tiny_model, server, bucket)) as run:
            run.start()
            await assert_shown(run, "this server refuses")
    finally:
        bucket.stop()


async def test_an_object_store_that_refuses_for_good_ends_the_trainer_with_the_remedy(
    tmp_path: Path, tiny_model: Path, server: EmbeddedServer
) -> None:
    bucket = Bucket(tmp_path / "s3.log", "no listing")
    try:
        async with opened_run(in_bucket(tmp_path / "run", tiny_model, server, bucket)) as run:
            run.start()
            assert await run.until_failed() == 78
            (end,) = [line for line in run.log().splitlines() if '"event": "service_failed"' in line]
    finally:
        bucket.stop()
    assert "allow them to list the bucket" in json.loads(end)["message"]


async def test_a_page_in_another_pod_shows_the_wait_and_its_end(
    tmp_path: Path, tiny_model: Path, server: EmbeddedServer, small_disk: Path
) -> None:
    config = write_run_file(
        tmp_path / "run", tiny_model, server, checkpoints={"folder": str(small_disk / "checkpoints")}
    )
    fill(small_disk / "filler")
    elsewhere = RunConfig.model_validate(
        config.model_dump()
        | {"folder": str(tmp_path / "pod"), "network": {"shared_folder": False}, "store": {"url": server.url}}
    )
    async with opened_run(config) as run, AdminClient() as client:
        states = ServiceStates(tmp_path / "pod", client)
        poller = MeshPoller(run.store, elsewhere, GatewayMetrics(Metrics("gateway")), Health(), states)

        async def shown() -> bool:
            await poller.step()
            return "trainer: disk full" in poller.overview().waiting_for

        run.start()
        await run.until("the wait on the page", shown, pause=0.05)
        (small_disk / "filler").unlink()

        async def over() -> bool:
            await poller.step()
            return "disk full" not in poller.overview().waiting_for

        await run.until("the end of the wait", over, pause=0.05)
