"""A full disk and an unreachable store: the trainer waits, says for what, and continues afterwards."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

from rollmesh.cli.main import app
from rollmesh.config import write_run_config
from rollmesh.errors import CheckpointError
from rollmesh.gateway.events import GatewayMetrics
from rollmesh.gateway.mesh_poller import MeshPoller
from rollmesh.launcher.console_notes import ServiceWatch
from rollmesh.runtime.endpoints import AdminClient, ServiceStates, read_endpoints
from rollmesh.runtime.health import Health
from rollmesh.runtime.metrics import Metrics
from rollmesh.trainer.service.run_log import METRICS_FILE, SAMPLES_FILE, append_lines, build_trackers

from ...kit.ledger import read_ledger
from ...kit.run_files import run_config
from ...kit.s3_server import Bucket
from .test_kills import assert_every_batch_counts_once
from .trainer_run import Runs, TrainerRun, release
from .two_ranks import run_two_ranks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("full", ["checkpoints", "run folder", "run folder without checkpoints"])
async def test_a_full_disk_delays_the_run_and_loses_nothing(
    runs: Runs, tmp_path: Path, small_disk: Path, full: str
) -> None:
    folder, checkpoints = (tmp_path, small_disk) if full == "checkpoints" else (small_disk, tmp_path)
    runs = replace(runs, folder=folder)
    steps = 12 if full == "run folder without checkpoints" else 4  # a report is smaller than the last block of its file
    async with (
        runs(
            trainer={"train_steps": steps},
            checkpoints={} if full == "run folder" else {"folder": str(checkpoints / "checkpoints")},
        ) as run,
        httpx.AsyncClient(timeout=60.0) as client,
    ):
        run.start()

        async def waits_for_room() -> bool:
            (endpoint,) = read_endpoints(run.folder, "trainer")
            answer = await client.get(f"http://{endpoint.admin}/readyz")
            return answer.status_code == 503 and "disk full" in answer.json()["reason"]

        async with run.fed(steps):
            await run.until_version(1, pause=0.001)
            filler = small_disk / "filler"
            fill(filler)
            await run.until("a trainer that waits for room", waits_for_room, pause=0.02)
            before = await run.store.policies.latest()
            assert before is not None and before.train_step < steps
            run.checkpoints.open(before)
            if full == "checkpoints":
                assert '"disk_full"' in run.log() and "bytes free" in run.log()
            filler.unlink()
            await run.until_finished()
        await assert_every_batch_counts_once(run, {})
        for name in (METRICS_FILE, SAMPLES_FILE):
            lines = run.lines(name)
            assert sorted({line["train_step"] for line in lines}) == list(range(1, steps + 1))
            assert len({(line["train_step"], line.get("trajectory_id")) for line in lines}) == len(lines)


async def test_a_version_in_flight_waits_for_room_on_the_disk(runs: Runs, small_disk: Path) -> None:
    checkpoints = {"folder": str(small_disk / "checkpoints"), "state_every_steps": 2}
    async with runs.held("before the folder", 2, checkpoints=checkpoints) as run:
        await run.until("the next step to be trained", lambda: run.waits_to_publish(2), pause=0.01)
        fill(small_disk / "filler")
        release(run)
        await run.until("a trainer that waits for room", lambda: bool(run.events("disk_full")), pause=0.02)
        assert run.events("disk_full")[0]["what"] == "publish"
        assert await run.versions() == [0, 1]
        (small_disk / "filler").unlink()
        await run.until_finished()
        await assert_every_batch_counts_once(run, {})


async def test_a_policy_that_cannot_be_marked_as_announced_is_marked_once_there_is_room(runs: Runs) -> None:
    async with runs(trainer={"train_steps": 1}) as run:
        run.start(fault="full marker")
        async with run.fed(1):
            await run.until_finished()
        assert [r.policy_version for r in run.checkpoints.complete_policies(announced_only=True)] == [0, 1]
        assert run.log().count("disk full while writing ANNOUNCED") == 2


def test_a_line_that_has_no_room_leaves_nothing_of_itself(small_disk: Path) -> None:
    file, filler = small_disk / "metrics.jsonl", small_disk / "filler"
    append_lines(file, [{"train_step": 1}])
    fill(filler)
    with pytest.raises(CheckpointError, match="disk full while writing metrics.jsonl, 0 bytes free"):
        append_lines(file, [{"train_step": 2, "text": "x" * 10_000}])
    filler.unlink()
    append_lines(file, [{"train_step": 3}])
    assert [json.loads(line) for line in file.read_text().splitlines()] == [{"train_step": 1}, {"train_step": 3}]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's thread
def test_a_tracker_on_a_full_disk_misses_steps_and_continues_later(small_disk: Path) -> None:
    (tracker,) = build_trackers(run_config(f"folder={small_disk} telemetry.trackers=[tensorboard]"))
    filler = small_disk / "filler"
    numbers = {f"number/{n}": float(n) for n in range(200)}
    tracker.log(1, numbers)
    fill(filler)
    for step in (2, 3):
        tracker.log(step, numbers)
    filler.unlink()
    tracker.log(4, numbers)
    tracker.close()
    events = EventAccumulator(str(small_disk / "tensorboard"))
    events.Reload()
    steps = [event.step for event in events.Scalars("number/0")]
    assert steps[0] == 1 and steps[-1] == 4


def test_ranks_whose_disk_is_full_on_one_rank_fail_together_and_save_later(tmp_path: Path, tiny_model: Path) -> None:
    leader, follower = run_two_ranks("fill_disk", tiny_model, tmp_path / "checkpoints")
    assert re.findall(r"^full (\S+)$", leader, re.MULTILINE) == ["rank-00001.json", "rank-00000.json", "COMMITTED"]
    assert "saved 00000000-s" in leader
    assert follower.count("disk full while writing a trainer state") == 3
    assert "followed to the end" in follower


def fill(path: Path) -> None:
    """Write until nothing fits any more."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:
                continue


async def test_a_trainer_waits_for_its_checkpoint_store_wherever_it_is_unreachable(runs: Runs) -> None:
    async with runs(trainer={"train_steps": 3}, checkpoints={"state_every_steps": 1}) as run:

        async def announced() -> bool:
            return len(await run.store.policies.announced()) == 3

        run.start(fault="unreachable")
        async with run.fed(2):
            await run.until("version 2", announced, pause=0.01)
            await run.store.rollbacks.request(1)
            await run.until_rolled_back()
            await run.feed(1)
            await run.until_finished()
            run.start(fault="unreachable")
            await run.until_finished()
        waits = [json.loads(line) for line in run.log().splitlines() if '"event": "unreachable"' in line]
        assert {wait["what"]: wait["message"].partition(":")[0] for wait in waits} == {
            "find_policy": "complete_policies",
            "read_batch": "stored_batch",
            "write_batch": "write_batch",
            "prune_policies": "prune",
            "prune_states": "prune_states",
            "list_batch_files": "batch_steps",
            "take_weights": "open",
            "load_state": "load_state",
            "open_session": "lineage",
            "remove_unfinished_batches": "remove_unfinished_batches",
        }
        assert await run.published() == [
            (0, 0), (1, 1), (2, 2), (3, 2), (4, 3)
        ]  # fmt: skip
        ledger = read_ledger(run.checkpoints)
        assert (ledger.committed_step, ledger.damaged, ledger.trained_twice) == (3, {}, {})


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
