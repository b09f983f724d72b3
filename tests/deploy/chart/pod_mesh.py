"""Meshes of pods that the tests start: what all of them are rendered with, and waits for what they do."""

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rollmesh.config.store import StoreConfig
from rollmesh.store import TrajectoryStore

from ...kit.waiting import until
from .pods import Machine, Pod
from .rendering import CHART, Helm, Rendering

KIND = CHART / "ci" / "kind-cpu-values.yaml"
SECRETS = {
    "rollmesh": {
        "redis-password": 'a "hard" one\\ with $(signs), / and spaces\n',
        "checkpoint-secret": "c" * 40 + "\n",
        "gateway-token": "g" * 24 + "\n",
        "mesh-token": "m" * 32 + "\n",
        "sglang-admin-key": "s" * 32 + "\n",
    }
}
SMALL = [
    "run.name=chart",
    "run.schedule.groups_per_batch=4",
    "run.schedule.group_size=4",
    "run.schedule.pool_size=32",
    "run.rollout.max_new_tokens=96",
    "run.generator.slots=16",
]
DEADLINE_SECONDS = 400


def machine_of(helm: Helm, sets: list[str], folder: Path, path: str) -> Machine:
    """The rendered chart on a loopback network of its own."""
    return machine_for(helm.template(CHART, [KIND], [*SMALL, *sets]), folder, path)


def machine_for(rendering: Rendering, folder: Path, path: str) -> Machine:
    """The same for a rendering."""
    # By process and moment, so that two test runs on one machine do not meet.
    network = f"127.{random.SystemRandom().randrange(1, 255)}.{random.SystemRandom().randrange(1, 255)}"
    return Machine(folder=folder / "machine", network=network, rendering=rendering, secrets=SECRETS, path=path)


def start_all(pods: dict[str, list[Pod]]) -> None:
    """Start every pod at once, as a cluster does."""
    everything = [pod for group in pods.values() for pod in group]
    everything[0]._machine.folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(everything)) as executor:
        list(executor.map(Pod.start, everything))


def wait_until(pods: dict[str, list[Pod]], done: Callable[[], bool], what: str) -> None:
    """Wait for a condition; a pod that has failed ends the wait with its log."""
    everyone = [pod for group in pods.values() for pod in group]

    def alive() -> None:
        for pod in everyone:
            assert pod.exit_status in (None, 0), f"{pod.name} ended with {pod.exit_status}\n{pod.log[-4000:]}"

    def missed() -> str:
        return "\n".join([what, *(f"--- {pod.name}\n{pod.log[-1500:]}" for pod in everyone)])

    until(done, missed, DEADLINE_SECONDS, check=alive, pause=0.5)


def versions(pods: dict[str, list[Pod]]) -> list[int]:
    """Policy versions that the queue knows."""
    return asyncio.run(_versions(pods))


async def _versions(pods: dict[str, list[Pod]]) -> list[int]:
    config = StoreConfig(
        url=f"redis://{pods['redis'][0].address}:6379/0", password=SECRETS["rollmesh"]["redis-password"]
    )
    async with await TrajectoryStore.connect(config, "chart") as store:
        return [policy.policy_version for policy in await store.policies.announced()]
