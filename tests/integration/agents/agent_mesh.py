"""A small run of outside agents: real queue, generator, leader and agents service; the trainer is played here."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from fastapi import FastAPI
from openai import AsyncOpenAI
from tokenizers import Tokenizer as HfTokenizer
from transformers import AutoModelForCausalLM

from rollmesh.agents.agents_service import OpenAiService, openai_service
from rollmesh.agents.main import build_app
from rollmesh.checkpoints.bucket import open_checkpoints
from rollmesh.checkpoints.manifest import CanarySequence
from rollmesh.config import RunConfig
from rollmesh.generator.main import serve as serve_generator
from rollmesh.rollout.main import serve as serve_rollout
from rollmesh.runtime.health import Health
from rollmesh.runtime.http_server import http_server, public_listener
from rollmesh.runtime.metrics import Metrics
from rollmesh.runtime.port_security import PortSecurity
from rollmesh.runtime.request_guard import RequestMetrics
from rollmesh.scheduling import run_limits
from rollmesh.store import EmbeddedServer, TrajectoryStore
from rollmesh.text import Tokenizer
from rollmesh.types import Batch

from ...kit import models
from ...kit.chat_tokenizers import write_tokenizer
from ...kit.checkpoint_samples import copy_of, publish
from ...kit.run_files import write_run
from ...kit.waiting import reached

TOKEN = "an-agent-token"
TASKS = [[{"role": "user", "content": f"the answer is {n}?"}] for n in range(40)]


WriteModel = Callable[[Path, int], Path]
"""Writes the model of a seed to a folder."""


def write_model(folder: Path, seed: int) -> Path:
    """A random Qwen2 over a byte-level vocabulary with ChatML."""
    # <|im_start|> is not special, so that a random model that writes it within an answer has it in the answer's text.
    write_tokenizer(folder, vocab_size=300, start="plain")
    tokenizer = HfTokenizer.from_file(str(folder / "tokenizer.json"))
    fields = {"max_position_embeddings": 1024, "eos_token_id": tokenizer.token_to_id("<|im_end|>")}
    config = models.tiny_qwen2(tokenizer.get_vocab_size(), **fields)
    return models.write_model(folder, config, seed, scale=3.0, shift=0.0)


def make_config(folder: Path, server: EmbeddedServer, write: WriteModel, **sections: Any) -> RunConfig:
    """A run of agents, or of what ``sections`` say."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = folder / "tasks.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": task, "answer": str(n)}) for n, task in enumerate(TASKS)))
    write(folder / "model", 0)
    data: dict[str, Any] = {
        "model": {"path": str(folder / "model")},
        "data": {
            "source": {"type": "jsonl", "path": str(rows), "chat": True},
            "max_prompt_tokens": 64,
            "shuffle": False,
            "held_out_ratio": 0,
        },
        "rollout": {"program": "agent", "max_new_tokens": 400, "partial_save_tokens": 64},
        "reward": {"verifier": "exact"},
        "schedule": {"groups_per_batch": 2, "group_size": 2, "pool_size": 8, "max_staleness": 4},
        "trainer": {"train_steps": 20},
        "checkpoints": {"secret": "0123456789abcdef0123456789abcdef"},
        # All services share one loop here, and whatever keeps it or the machine busy keeps every heartbeat back.
        "store": {"url": server.url, "heartbeat_seconds": 0.3, "session_ttl_seconds": 12.0},
        "generator": {"slots": 8, "max_context_tokens": 512, "device": "cpu", "drain_timeout_seconds": 4.0},
    }
    return write_run(folder, data, sections)


@dataclass
class Api:
    """One service and its clients."""

    service: OpenAiService
    registry: Metrics
    url: str
    shutdown: asyncio.Event
    app: FastAPI
    health: Health
    clients: list[AsyncOpenAI] = field(default_factory=list)
    """Open until the service ends."""

    def client(self, **options: Any) -> AsyncOpenAI:
        options = {"base_url": f"{self.url}/v1", "api_key": TOKEN, "max_retries": 0, **options}
        self.clients.append(AsyncOpenAI(**options))
        return self.clients[-1]

    def value(self, name: str, **labels: str) -> float:
        return self.registry.registry.get_sample_value(name, labels) or 0.0


@dataclass
class AgentMesh:
    """A run; policies are published and batches claimed by the test."""

    config: RunConfig
    store: TrajectoryStore
    tokenizer: Tokenizer
    write: WriteModel
    trainer: str = ""
    versions: int = 0
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    shutdown: asyncio.Event = field(default_factory=asyncio.Event)

    async def publish(self) -> None:
        """Publish and announce the next version, with its true canary."""
        if not self.trainer:
            await self.store.limits.init_run(run_limits(self.config))
            self.trainer = await self.store.training.open_session("test")
        version = self.versions
        source = self.write(Path(self.config.folder) / f"model-{version}", version)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
        canary = []
        for seed in range(2):
            ids = np.random.default_rng(seed).integers(2, 250, 16)
            with torch.inference_mode():
                logprobs = torch.log_softmax(model(torch.from_numpy(ids)[None]).logits[0], -1)
            gathered = logprobs[:-1].gather(1, torch.from_numpy(ids)[1:, None]).squeeze(1)
            canary.append(CanarySequence(token_ids=ids.tolist(), logprobs=gathered.tolist()))
        checkpoints = open_checkpoints(self.config)
        record = publish(checkpoints, version, self.trainer, write=copy_of(source), canary=canary)
        await self.store.policies.announce(self.trainer, record)
        self.versions += 1

    def start(self, service: Callable[..., Any], index: int = 0) -> None:
        self.tasks.append(asyncio.create_task(service(self.config, index, self.shutdown)))

    async def serving(self, version: int) -> None:
        """Wait until a generator serves a version."""
        await self.until(f"version {version} served", lambda: self._serves(version))

    async def _serves(self, version: int) -> bool:
        return any(g.serving and g.policy_version == version for g in await self.store.generators.live())

    async def until(self, what: str, condition: Callable[[], Any], seconds: float = 120.0) -> None:
        def fail() -> None:
            for task in self.tasks:
                if task.done():
                    task.result()

        await reached(condition, what, seconds, check=fail, pause=0.02)

    async def batch(self, step: int) -> Batch:
        """The batch of a train step, once it is cut; it counts as trained from then on."""
        batch = await self.store.training.claim(self.trainer, step, 120.0)
        assert batch is not None
        await self.store.training.confirm_batch_file(self.trainer, step, "00")
        await self.store.training.report_trained(self.trainer, step)
        return batch

    @asynccontextmanager
    async def api(self, index: int = 0, grace_seconds: int = 1) -> AsyncIterator[Api]:
        """An agents service in this process, at a port of its own."""
        shutdown, registry, health = asyncio.Event(), Metrics("agents"), Health()
        listener, address = public_listener(self.config, "127.0.0.1", 0, "port")
        security = PortSecurity.from_config(self.config.security)
        async with openai_service(
            self.config, index, self.store, self.tokenizer, registry, health, shutdown, address, security
        ) as service:
            app = build_app(service, TOKEN, RequestMetrics(registry), "127.0.0.1")
            async with http_server(app, listener, security, grace_seconds=grace_seconds):
                made = Api(service, registry, f"{security.scheme}://{address}", shutdown, app, health)
                yield made
                await asyncio.gather(*(client.close() for client in made.clients))

    async def aclose(self) -> None:
        self.shutdown.set()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@asynccontextmanager
async def agent_mesh(
    folder: Path,
    server: EmbeddedServer,
    *,
    retry_seconds: float = 20.0,
    write: WriteModel = write_model,
    **sections: Any,
) -> AsyncIterator[AgentMesh]:
    """A run with a served policy 0 and a leader; ``retry_seconds``: how long the service waits for Redis."""
    config = make_config(folder, server, write, **sections)
    async with await TrajectoryStore.connect(config.store, config.name, retry_seconds=retry_seconds) as store:
        mesh = AgentMesh(config, store, Tokenizer(config.model.path), write)
        try:
            await mesh.publish()
            mesh.start(serve_generator)
            mesh.start(serve_rollout)
            await mesh.serving(0)
            yield mesh
        finally:
            await mesh.aclose()


def _start_agents(mesh: AgentMesh, port: int) -> subprocess.Popen[bytes]:
    file = Path(mesh.config.folder) / "run.yaml"
    command = [sys.executable, "-m", "rollmesh.cli.main", "agents", str(file), "--set", f"agents.port={port}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ROLLMESH_GATEWAY__TOKEN": TOKEN}
    with (Path(mesh.config.folder) / "agents.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


@asynccontextmanager
async def agents_process(mesh: AgentMesh, port: int) -> AsyncIterator[subprocess.Popen[bytes]]:
    """A real agents service process at a port, ready to answer."""
    process = _start_agents(mesh, port)
    try:
        async with httpx.AsyncClient(trust_env=False) as http:

            async def answers() -> bool:
                assert process.poll() is None, (Path(mesh.config.folder) / "agents.log").read_text()
                try:
                    return (await http.get(f"http://127.0.0.1:{port}/v1/openapi.json")).status_code == 200
                except httpx.HTTPError:
                    return False

            await mesh.until("the service answers", answers)
        yield process
    finally:
        process.kill()
        process.wait()
