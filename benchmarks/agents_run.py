"""Run of agents for the bench ``agents``: Redis, generator, leader and agents service as processes, and their policy.

The policy is a small Qwen2 that writes the same call of a tool in every turn: each token's embedding points at the
token that follows it, and the layers, which compute as others do, add nothing.
"""

import asyncio
import itertools
import json
import os
import subprocess
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import torch
from renderers import config_from_name, create_renderer
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

from benchmarks.models import PublishedModel, write_random_model
from benchmarks.otlp_collector import Collector, collector
from benchmarks.processes import command, running_redis, write_run_file
from rollmesh.agents.chat_format import NamedTokenizer
from rollmesh.checkpoints.bucket import open_checkpoints
from rollmesh.checkpoints.sealing import api_token
from rollmesh.config import RunConfig
from rollmesh.errors import RollmeshError
from rollmesh.runtime.endpoints import read_endpoints
from rollmesh.runtime.tasks import cancel_and_wait
from rollmesh.scheduling import run_limits
from rollmesh.store import TrajectoryStore
from rollmesh.text import Tokenizer as RunTokenizer
from rollmesh.types import GeneratorRecord

CHUNK_TOKENS = 32
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_response>", "</tool_response>")
_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
_WORDS = [f"thought{number} " for number in range(24)]
_CALL = ["<tool_call>", '\n{"name": "search", "arguments": {"query": "weather"}}\n', "</tool_call>"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{what} for the words of the query; the newest results come first.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    }
    for name, what in (("search", "Search the web"), ("read", "Read the page"), ("note", "Look through the notes"))
]
SYSTEM = {"role": "system", "content": "You plan a journey. Look up all that you need, then name the day."}
RESULT = "sunny with 21 degrees and a light wind from the west"
_DEADLINE_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentsRun:
    """Run in progress, for agents and for calls straight to its generator."""

    http: aiohttp.ClientSession
    """Client of the agents service, with the run's token; 200 connections cost it no more than one."""
    generator: GeneratorRecord
    pid: int
    """Process of the agents service."""
    traces: Collector
    """What the generator traced; complete once the run has ended."""


@asynccontextmanager
async def agents_run(folder: Path, *, sessions: int, at_once: int) -> AsyncIterator[AgentsRun]:
    """Start a run for this number of sessions in all and ``at_once``; batches are consumed, and no policy changes."""
    async with AsyncExitStack() as stack:
        server = stack.enter_context(running_redis(folder / "redis", 2048))
        await asyncio.to_thread(write_policy, folder / "model")
        config = _write_run_file(folder, server.url, sessions, at_once)
        store = await stack.enter_async_context(await TrajectoryStore.connect(config.store, config.name))
        trainer = await _publish(config, store)
        stack.push_async_callback(cancel_and_wait, asyncio.create_task(_consume(store, trainer)))
        traces = stack.enter_context(collector())
        traced = {"ROLLMESH_TELEMETRY__OTLP_ENDPOINT": traces.url}
        processes = [
            _start(folder, name, env) for name, env in (("generator", traced), ("rollout", {}), ("agents", {}))
        ]
        for process in processes:
            stack.push_async_callback(asyncio.to_thread, process.wait)
            stack.callback(process.terminate)
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while True:
            serving = [record for record in await store.generators.live() if record.serving]
            urls = [endpoint.url for endpoint in read_endpoints(folder, "agents")]
            if serving and urls:
                break
            if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
                raise RollmeshError(f"the run does not start:\n{_logs(folder)}")
            await asyncio.sleep(0.05)
        http = await stack.enter_async_context(
            aiohttp.ClientSession(
                urls[0].rstrip("/") + "/",
                headers={"Authorization": f"Bearer {api_token(config)}"},
                timeout=aiohttp.ClientTimeout(_DEADLINE_SECONDS),
                connector=aiohttp.TCPConnector(limit=0),
            )
        )
        yield AgentsRun(http=http, generator=serving[0], pid=processes[-1].pid, traces=traces)


def _start(folder: Path, name: str, variables: Mapping[str, str] = MappingProxyType({})) -> subprocess.Popen[bytes]:
    words = command(name, folder / "run.yaml", "--supervised-by", os.getpid())
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(words, stdout=log, stderr=log, env={**os.environ, **variables})


def _logs(folder: Path) -> str:
    return "\n".join(log.read_text()[-2000:] for log in sorted(folder.glob("*.log")))


def write_policy(folder: Path) -> None:
    """Write the tokenizer and the weights."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([json.dumps(TOOLS), SYSTEM["content"], RESULT] * 4, trainer)
    tokenizer.add_tokens(["<think>", "</think>", *_CALL, *_WORDS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    end = tokenizer.token_to_id("<|im_end|>")
    write_random_model(
        folder,
        {
            "hidden_size": 128,
            "num_hidden_layers": 3,
            "intermediate_size": 256,
            "vocab_size": tokenizer.get_vocab_size(),
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
            "eos_token_id": end,
        },
    )
    renderer: Any = create_renderer(NamedTokenizer(RunTokenizer(folder)), config_from_name("qwen3"))
    start = renderer.render([SYSTEM], tools=TOOLS, add_generation_prompt=True).token_ids[-1]
    _teach(folder, [start, *(tokenizer.token_to_id(word) for word in (*_WORDS, *_CALL)), end])


def _teach(folder: Path, chain: list[int | None]) -> None:
    """Set the weights such that each token of the chain is followed by the next one."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding = torch.nn.functional.normalize(torch.randn_like(model.model.embed_tokens.weight), dim=-1)
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.zero_()
        model.lm_head.weight[chain[1:]] = 4.0 * embedding[chain[:-1]]  # logits of 4 * sqrt(128) beside those below 20
    model.save_pretrained(folder)


def _write_run_file(folder: Path, url: str, sessions: int, at_once: int) -> RunConfig:
    rows = folder / "tasks.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": [SYSTEM], "answer": str(n)}) for n in range(sessions)))
    batch = 64
    data = {
        "name": "bench",
        "folder": str(folder),
        "model": {"path": str(folder / "model")},
        "data": {
            "source": {"type": "jsonl", "path": str(rows), "chat": True},
            "max_prompt_tokens": 64,
            "held_out_ratio": 0,
        },
        "rollout": {
            "program": "agent",
            "agent": {"contexts": "free"},
            "max_new_tokens": 960,
            "partial_save_tokens": 2 * CHUNK_TOKENS,
        },
        "agents": {"renderer": "qwen3"},
        "reward": {"verifier": "exact"},
        # All versions are the first one: no group is too old.
        "schedule": {
            "groups_per_batch": batch,
            "group_size": 2,
            "pool_size": 2 * at_once,
            "max_staleness": sessions // batch + 1,
        },
        "trainer": {"train_steps": 1_000_000},
        # A step as long as that of a larger model, so that the generator leaves the processors to the service.
        "generator": {"slots": 2 * at_once, "max_context_tokens": 1024, "device": "cpu", "pace": [[1, 0.01]]},
        "store": {"url": url},
        "telemetry": {"log_level": "error"},
    }
    return write_run_file(folder / "run.yaml", data)


async def _consume(store: TrajectoryStore, trainer: str) -> None:
    """Take every batch as a trainer does, and announce no version for it."""
    for step in itertools.count(1):
        while await store.training.claim(trainer, step, 10.0) is None:
            continue
        await store.training.confirm_batch_file(trainer, step, "00")
        await store.training.report_trained(trainer, step)


async def _publish(config: RunConfig, store: TrajectoryStore) -> str:
    """Publish the policy and return the trainer's session."""
    await store.limits.init_run(run_limits(config))
    session = await store.training.open_session("bench")
    write, score = await asyncio.to_thread(PublishedModel(Path(config.model.path)).policy, 0)
    record = await asyncio.to_thread(
        open_checkpoints(config).publish,
        session=session,
        policy_version=0,
        train_step=0,
        parent=None,
        write=write,
        canary=score(),
    )
    await store.policies.announce(session, record)
    return session
