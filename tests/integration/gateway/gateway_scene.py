"""A populated run on a real server, and a real gateway process in front of it."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml

from rollmesh.checkpoints.bucket import open_checkpoints
from rollmesh.config import RunConfig, load_run_config
from rollmesh.config.recipes import recipe_file
from rollmesh.mesh import Cursor, Desired
from rollmesh.runtime.endpoints import Endpoint, read_endpoints
from rollmesh.scheduling import run_limits
from rollmesh.store import Append, Finish, LeasedTrajectory, NewGroup, Score, TokenDigest, TrajectoryStore
from rollmesh.text import Tokenizer
from rollmesh.types import (
    Batch,
    FinishReason,
    Group,
    OutcomeKind,
    Prompt,
    RewardOutcome,
    Segment,
)

from ...kit.checkpoint_samples import write_batch
from ...kit.records import environment_tokens, policy_record, policy_tokens
from ...kit.waiting import reached
from ...kit.warm import GATEWAY, WarmProcess, template

DEADLINE_SECONDS = 120.0
"""For what comes in a moment unless the machine is busy with other things: a start, an answer, the next look."""
STOP_SECONDS = 30.0
"""As much as Kubernetes gives a process."""


def write_run_file(folder: Path, name: str, **gateway: Any) -> Path:
    """The demo's run file with a name, a folder and a gateway section of its own."""
    data = yaml.safe_load(recipe_file("countdown", "demo.yaml").read_text())
    data |= {"name": name, "folder": str(folder / "run"), "gateway": {"sample_seconds": 0.2, **gateway}}
    data["schedule"] |= {"groups_per_batch": 2, "group_size": 2, "pool_size": 8}
    # No worker renews the sessions of a scene: they have to outlive the start of a gateway on a slow machine.
    data["store"] = {**data.get("store", {}), "session_ttl_seconds": 900.0}
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(data))
    return file


@dataclass
class Scene:
    """A run's queue with a leader, a trainer and a worker session."""

    store: TrajectoryStore
    config: RunConfig
    tokenizer: Tokenizer
    leader: str
    trainer: str
    session: str
    digests: dict[str, TokenDigest] = field(default_factory=dict)
    """Of the tokens that were appended."""

    @classmethod
    async def begin(cls, store: TrajectoryStore, config: RunConfig, tokenizer: Tokenizer) -> "Scene":
        await store.limits.init_run(run_limits(config))
        leader = await store.leadership.acquire("rollout-0")
        assert leader is not None
        trainer = await store.training.open_session("trainer")
        await store.policies.announce(trainer, policy_record(0))
        await store.leadership.set_desired(leader, Desired(pool_size=8))
        return cls(store, config, tokenizer, leader, trainer, await store.sessions.open("rollout-0"))

    async def admit(self, count: int) -> None:
        before = await self.store.leadership.cursor()
        groups = [
            NewGroup(
                group_id=f"e0-{index}",
                prompt=Prompt(
                    prompt_id=str(index),
                    token_ids=self.tokenizer.encode(f"1 2 {index % 9 + 1} > 3 :"),
                    verifier="countdown",
                    metadata={"target": 3, "index": index},
                ),
                needed=2,
                epoch=0,
                index=index,
            )
            for index in range(before.index, before.index + count)
        ]
        await self.store.leadership.admit(self.leader, groups, before, Cursor(epoch=0, index=before.index + count))

    def segment(self, text: str, version: int = 0, kv_min_version: int | None = None) -> Segment:
        ids = self.tokenizer.encode(text)
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32) / 10
        oldest = version if kv_min_version is None else kv_min_version
        return policy_tokens(ids, version, behavior_logprobs=logprobs, kv_min_version=oldest)

    def spoken(self, text: str) -> Segment:
        """Tokens of the environment."""
        return environment_tokens(self.tokenizer.encode(text))

    async def append(self, trajectory_id: str, offset: int, *segments: Segment) -> int:
        digest = self.digests.get(trajectory_id, TokenDigest())
        item = Append(trajectory_id=trajectory_id, token_offset=offset, segments=segments, digest=digest)
        self.digests[trajectory_id] = digest.extended(segments)
        (result,) = await self.store.trajectories.append(self.session, [item])
        assert result.status.ok, result
        return result.saved_token_count

    async def complete(self, leased: LeasedTrajectory, value: float) -> None:
        trajectory_id = leased.trajectory.trajectory_id
        finish = Finish(
            trajectory_id=trajectory_id,
            token_offset=leased.trajectory.response_token_count,
            segments=[self.segment("1 + 2 = 3 !")],
            finish_reason=FinishReason.STOP,
            incarnation=leased.incarnation,
            digest=TokenDigest().extended(leased.trajectory.segments),
        )
        await self.store.trajectories.finish(self.session, [finish])
        outcome = RewardOutcome(kind=OutcomeKind.SCORED, value=value, parts={"right": value})
        await self.store.trajectories.score(
            self.session, [Score(trajectory_id=trajectory_id, outcome=outcome, shaped_reward=value)]
        )

    async def complete_all(self) -> None:
        while leased := await self.store.trajectories.lease(self.session, 64):
            for item in leased:
                await self.complete(item, float(item.trajectory.member_index))

    async def train(self, train_step: int, group_ids: list[str]) -> None:
        """Cut, write the batch file, train, announce the next policy."""
        await self.store.leadership.cut(self.leader, train_step, group_ids)
        batch = await self.store.training.claim(self.trainer, train_step, 5.0)
        assert isinstance(batch, Batch)
        assert all(isinstance(group, Group) for group in batch.groups)
        digest = write_batch(open_checkpoints(self.config), batch, await self.store.leadership.cursor())
        await self.store.training.confirm_batch_file(self.trainer, train_step, digest)
        await self.store.training.report_trained(self.trainer, train_step)
        await self.store.policies.announce(self.trainer, policy_record(train_step))


@dataclass
class RunningGateway:
    """A ``rollmesh gateway`` process."""

    process: WarmProcess
    endpoint: Endpoint
    log: Path

    @property
    def url(self) -> str:
        return self.endpoint.url

    def client(self, **options: Any) -> httpx.AsyncClient:
        """A client that waits as long for an answer as the tests do."""
        return httpx.AsyncClient(base_url=self.url, **{"timeout": DEADLINE_SECONDS, **options})

    async def logged(self, text: str) -> None:
        """Wait until the log says so."""
        await reached(lambda: text in self.log.read_text(), self.log.read_text, DEADLINE_SECONDS, pause=0.05)

    def terminate(self) -> int:
        """SIGTERM; returns the exit status, TimeoutExpired when it takes longer than a process is given."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_SECONDS)


def start_gateway(run_file: Path, store_url: str, environment: Mapping[str, str] | None = None) -> RunningGateway:
    """Start the process and wait until it is ready."""
    folder = Path(load_run_config(run_file).folder)
    log = folder.parent / "gateway.log"
    log.write_text("")
    process = template(*GATEWAY).start(
        "rollmesh.cli.main",
        ["gateway", str(run_file)],
        output=log,
        environment={**os.environ, "ROLLMESH_STORE__URL": store_url, **(environment or {})},
    )
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        for endpoint in read_endpoints(folder, "gateway"):
            ready = f"http://{endpoint.admin}/readyz"
            if endpoint.pid == process.pid and httpx.get(ready, timeout=DEADLINE_SECONDS).status_code == 200:
                return RunningGateway(process, endpoint, log)
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"the gateway is not ready after {DEADLINE_SECONDS} s:\n{log.read_text()}")


async def until(client: httpx.AsyncClient, path: str, holds: Callable[[Any], bool]) -> Any:
    """Ask until the answer is as it should be; returns it."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        body = (await client.get(path)).json()
        if holds(body):
            return body
        assert time.monotonic() < deadline, body
        await asyncio.sleep(0.05)
