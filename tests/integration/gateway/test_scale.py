"""Ten thousand rollouts in flight in front of one gateway."""

import math
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from rollmesh.mesh import Desired
from rollmesh.store import Append

from .gateway_scene import RunningGateway, Scene, until, write_run_file

ROLLOUTS = 10_000
SHOWN = 750
QUICK_SECONDS = 1.0
"""Bar of an answer."""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    file = write_run_file(tmp_path, "ten-thousand", sample_seconds=1.0, timeline_rollouts=1000)
    data = yaml.safe_load(file.read_text())
    data["schedule"] |= {"groups_per_batch": 2000, "pool_size": ROLLOUTS}
    file.write_text(yaml.safe_dump(data))
    return file


async def fill(scene: Scene) -> None:
    """Lease ten thousand trajectories and save a hundred tokens of each."""
    await scene.store.leadership.set_desired(scene.leader, Desired(pool_size=ROLLOUTS))
    for _ in range(10):
        await scene.admit(ROLLOUTS // 20)
    segment = scene.segment("1 + 2 = 3 , " * 8)
    while leased := await scene.store.trajectories.lease(scene.session, 64):
        items = [
            Append(trajectory_id=one.trajectory.trajectory_id, token_offset=0, segments=[segment]) for one in leased
        ]
        assert all(result.status.ok for result in await scene.store.trajectories.append(scene.session, items))


async def seconds_of(client: httpx.AsyncClient, path: str) -> float:
    """Of the first answer that is quick, or the fastest of twenty: a slow gateway is slow each time, a machine not."""
    fastest = math.inf
    for _ in range(20):
        begun = time.perf_counter()
        assert (await client.get(path)).status_code == 200
        fastest = min(fastest, time.perf_counter() - begun)
        if fastest < QUICK_SECONDS:
            break
    return fastest


async def test_ten_thousand_rollouts_are_counted_a_part_is_followed_and_answers_stay_quick(
    run_file: Path, scene: Scene, started: Callable[..., RunningGateway]
) -> None:
    await fill(scene)
    gateway = started(run_file)
    process = psutil.Process(gateway.process.pid)
    async with gateway.client() as client:
        timeline = await until(client, "api/v1/timeline", lambda body: len(body["rollouts"]) == SHOWN)
        assert (timeline["in_flight"], timeline["left_out"]) == (ROLLOUTS, ROLLOUTS - SHOWN)
        overview = await until(client, "api/v1/overview", lambda body: body["trajectories"]["leased"] == ROLLOUTS)
        assert overview["pool_size"] == ROLLOUTS
        memory = process.memory_info().rss
        quick = {path: await seconds_of(client, f"api/v1/{path}") for path in ("overview", "timeline", "trajectories")}
        assert max(quick.values()) < QUICK_SECONDS, quick
        cpu, since = sum(process.cpu_times()[:2]), time.monotonic()
        looks = await look_count(client, gateway) + 5
        async with client.stream("GET", "api/v1/events") as events:
            async for _ in events.aiter_lines():
                if await look_count(client, gateway) >= looks:
                    break
        share = (sum(process.cpu_times()[:2]) - cpu) / (time.monotonic() - since)
        assert share < 0.5, f"{share:.0%} of a core to look once a second"
        assert process.memory_info().rss - memory < 32 << 20
        assert process.memory_info().rss < 400 << 20


async def look_count(client: httpx.AsyncClient, gateway: RunningGateway) -> float:
    """Looks so far, as the gateway's metrics tell."""
    text = (await client.get(f"http://{gateway.endpoint.admin}/metrics")).text
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return next(sample.value for sample in samples if sample.name == "rollmesh_gateway_look_seconds_count")
