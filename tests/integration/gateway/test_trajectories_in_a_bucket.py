"""Trained trajectories whose batch files are in a bucket, seen from a gateway on another machine."""

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from ...kit.s3_server import Bucket
from ...kit.waiting import reached
from .gateway_scene import DEADLINE_SECONDS, RunningGateway, Scene, until, write_run_file

STEPS = 5


@pytest.fixture
def run_file(tmp_path: Path, own_bucket: Bucket) -> Path:
    file = write_run_file(tmp_path, f"in-a-bucket-{own_bucket.port}")
    section = own_bucket.section("runs/one").model_dump(include={"folder", "object_store"})
    data = yaml.safe_load(file.read_text())
    data["checkpoints"] = {**section, "secret": "0123456789abcdef0123456789abcdef"}
    file.write_text(yaml.safe_dump(data))
    return file


async def _train(scene: Scene) -> None:
    for step in range(1, STEPS + 1):
        await scene.admit(2)
        await scene.complete_all()
        await scene.train(step, [f"e0-{2 * step - 2}", f"e0-{2 * step - 1}"])
        await scene.store.step_reports.write(scene.trainer, step - 1, [{"train_step": step, "reward_mean": step / 8}])


async def test_a_gateway_elsewhere_reads_one_group_from_the_bucket_and_keeps_nothing(
    run_file: Path, scene: Scene, started: Callable[..., RunningGateway], tmp_path: Path
) -> None:
    await _train(scene)
    own = tmp_path / "another machine"
    gateway = started(run_file, None, ROLLMESH_CHECKPOINTS__CACHE_FOLDER=str(own))
    async with gateway.client() as client:
        for group in (0, 2 * STEPS - 1, 5):
            answer = await client.get(f"api/v1/trajectories/e0-{group}.1")
            assert answer.status_code == 200, answer.text
            detail = answer.json()
            assert (detail["found_in"], detail["state"]) == ("batch", "consumed")
            assert detail["train_step"] == group // 2 + 1
            assert detail["members"] == [f"e0-{group}.0", f"e0-{group}.1"]
            assert "".join(detail["runs"][1]["texts"]).strip() == "1 + 2 = 3 !"
        path = "api/v1/series?names=reward_mean"
        curve = (await until(client, path, lambda body: len(body["series"][0]["x"]) == STEPS))["series"][0]
        assert curve["mean"] == [step / 8 for step in range(1, STEPS + 1)]
        unknown = await client.get("api/v1/trajectories/e7-7.0")
        assert unknown.status_code == 404
    assert [file for file in own.rglob("*") if file.is_file()] == []


async def test_a_bucket_that_does_not_answer_costs_the_viewer_alone(
    run_file: Path, scene: Scene, started: Callable[..., RunningGateway], own_bucket: Bucket, tmp_path: Path
) -> None:
    await _train(scene)
    gateway = started(run_file, None, ROLLMESH_CHECKPOINTS__CACHE_FOLDER=str(tmp_path / "another machine"))
    async with gateway.client() as client:
        await until(client, "api/v1/overview", lambda body: body["train_step"] == STEPS)
        own_bucket.process.send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        asked = [asyncio.create_task(client.get(f"api/v1/trajectories/e0-{n}.0")) for n in range(2 * STEPS)]
        states, looked_since = set(), False
        # Clients are answered and looks go on while the bucket stands still.
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not (looked_since and all(task.done() for task in asked)):
                asking = time.monotonic()
                overview = (await client.get("api/v1/overview")).json()
                states.add(overview["state"])
                looked_since = overview["age_seconds"] < asking - begun
                await asyncio.sleep(0.2)
        assert "unreachable" not in states
        answers = [await task for task in asked]
        assert {answer.status_code for answer in answers} == {503}
        assert all(answer.json()["hint"] == "retry in a moment" for answer in answers)
        own_bucket.process.send_signal(signal.SIGCONT)

        async def there() -> bool:
            return (await client.get("api/v1/trajectories/e0-3.0")).status_code == 200

        await reached(there, pause=0.2)
