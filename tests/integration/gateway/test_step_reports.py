"""The curves of a gateway that cannot read the trainer's run folder, and of one that can again."""

import json
from pathlib import Path
from typing import Any

import httpx

from .gateway_scene import RunningGateway, Scene, until

SERIES = "api/v1/series?names=reward_mean&points=2000"


def report(step: int, attempt: int = 0) -> dict[str, Any]:
    return {
        "train_step": step,
        "time": 100.0 * attempt + step,
        "reward_mean": attempt + step / 4096,
        "seconds": {"gradient": 0.5},
        "batch": {"trajectory_staleness": {"histogram": {"0": 3, "2": attempt + 1}}},
    }


def reports(*steps: int, attempt: int = 0) -> list[dict[str, Any]]:
    return [report(step, attempt) for step in steps]


async def shows(client: httpx.AsyncClient, expected: list[dict[str, Any]]) -> None:
    """Wait until the curve has these points and no others, and the newest of them is the newest report."""

    def holds(body: Any) -> bool:
        (curve,) = body["series"]
        points = list(zip(curve["x"], curve["mean"], strict=True))
        return points == [(float(each["train_step"]), each["reward_mean"]) for each in expected]

    await until(client, SERIES, holds)
    newest = expected[-1]
    overview = await until(client, "api/v1/overview", lambda body: (body["report"] or {}).get("time") == newest["time"])
    assert (overview["report"]["train_step"], overview["report"]["seconds"]) == (newest["train_step"], 0.5)
    trained = {str(each["staleness"]): each["count"] for each in overview["staleness"]["trained"]}
    assert trained == newest["batch"]["trajectory_staleness"]["histogram"]


async def test_without_the_file_curves_come_from_the_queue(client: httpx.AsyncClient, scene: Scene) -> None:
    store, trainer = scene.store, scene.trainer
    await store.step_reports.write(trainer, 0, reports(1))
    await shows(client, reports(1))
    # More than one look takes in.
    await store.step_reports.write(trainer, 1, reports(*range(2, 1201)))
    await shows(client, reports(*range(1, 1201)))
    await store.step_reports.write(trainer, 1200, reports(1201))
    await shows(client, reports(*range(1, 1202)))


async def test_a_step_that_is_trained_again_is_shown_once_and_as_it_was_trained_last(
    client: httpx.AsyncClient, scene: Scene
) -> None:
    store, trainer = scene.store, scene.trainer
    await store.step_reports.write(trainer, 0, reports(1, 2, 3, 4))
    await shows(client, reports(1, 2, 3, 4))
    # A restarted trainer goes on from step 2, and is looked at before and after it has trained anything.
    await store.step_reports.write(trainer, 2)
    await shows(client, reports(1, 2))
    await store.step_reports.write(trainer, 2, reports(3, attempt=1))
    await shows(client, reports(1, 2) + reports(3, attempt=1))
    # Another one is not seen before it has passed the step where the first one was.
    await store.step_reports.write(trainer, 1, reports(2, 3, 4, 5, attempt=2))
    await shows(client, reports(1) + reports(2, 3, 4, 5, attempt=2))


async def test_a_file_that_appears_is_read_from_its_start_and_the_queue_serves_when_it_is_gone(
    client: httpx.AsyncClient, scene: Scene, gateway: RunningGateway
) -> None:
    store, trainer, file = scene.store, scene.trainer, Path(scene.config.folder) / "metrics.jsonl"
    await store.step_reports.write(trainer, 2, reports(3, 4))
    await shows(client, reports(3, 4))
    file.write_text("".join(json.dumps(each) + "\n" for each in reports(1, 2, 3, 4)))
    await shows(client, reports(1, 2, 3, 4))
    file.unlink()
    await store.step_reports.write(trainer, 4, reports(5))
    await shows(client, reports(1, 2, 3, 4, 5))
    # A folder in the place of the file: it cannot be read, which fails for root, too.
    file.mkdir()
    await store.step_reports.write(trainer, 5, reports(6))
    await shows(client, reports(1, 2, 3, 4, 5, 6))
    await gateway.logged("run_folder_unreadable")
    file.rmdir()
    file.write_text("".join(json.dumps(each) + "\n" for each in reports(1, 2, 3, attempt=1)))
    await shows(client, reports(1, 2, 3, attempt=1))
