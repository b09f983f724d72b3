"""An SGLang server without a model: its answers and its troubles are those that a test asks for."""

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from rollmesh.generator.engines.sglang.sglang_engine import SglangEngine
from rollmesh.types import GenerationCall, SamplingParams

from ....sglang_cpu.options import sglang_options

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
VOCAB, LONGEST = 50, 64


@dataclass(eq=False)
class ScriptedServer:
    """One server; every field may be changed while it runs."""

    version: str = "0"
    key: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    """Additional fields of /server_info."""
    deaf: bool = False
    """/generate is taken and not answered until ``release`` is set."""
    deaf_update: bool = False
    """/update_weights_from_disk changes the weights and does not answer."""
    status: int = 200
    """Of the answers to /generate."""
    empty: bool = False
    """Answers without a token."""
    drafts: dict[str, int] = field(default_factory=dict)
    """Fields about drafts in every answer."""
    retractions: int = 0
    """Of every answer, besides those of pauses."""
    release: asyncio.Event = field(default_factory=asyncio.Event)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Open while the server is not paused."""
    seen: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Requests by path, with their body."""
    url: str = ""

    def __post_init__(self) -> None:
        self.gate.set()

    def count(self, path: str) -> int:
        return sum(1 for seen, _ in self.seen if seen == path)

    async def answer(self, request: web.Request) -> web.Response:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        text = await request.text()
        body = json.loads(text) if text else {}
        self.seen.append((request.path, body))
        return await getattr(self, "_" + request.path.strip("/"))(body)

    async def _generate(self, body: dict[str, Any]) -> web.Response:
        pauses = self.count("/pause_generation")
        await self.gate.wait()
        if self.status != 200:
            return web.json_response({"error": {"message": "not now"}}, status=self.status)
        if self.deaf:
            await self.release.wait()
        count = 0 if self.empty else body["sampling_params"]["max_new_tokens"]
        ids = body["input_ids"]
        meta = {
            **self.drafts,
            "finish_reason": {"type": "length"},
            "prompt_tokens": len(ids),
            "cached_tokens": 0,
            "num_retractions": self.retractions + self.count("/pause_generation") - pauses,
            "weight_version": self.version,
            "weight_versions": [{"version": self.version, "start": 0, "end": count}] if count else [],
            "output_token_logprobs": [[-1.0, 5, None]] * count,
            "input_token_logprobs": [[None, i, None] if n == 0 else [-1.0, i, None] for n, i in enumerate(ids)],
        }
        return web.json_response({"output_ids": [5] * count, "meta_info": meta})

    async def _abort_request(self, body: dict[str, Any]) -> web.Response:
        return web.Response()

    async def _pause_generation(self, body: dict[str, Any]) -> web.Response:
        self.gate.clear()
        return web.json_response({})

    async def _continue_generation(self, body: dict[str, Any]) -> web.Response:
        self.gate.set()
        return web.json_response({})

    async def _update_weights_from_disk(self, body: dict[str, Any]) -> web.Response:
        self.version = body["weight_version"]
        if self.deaf_update:
            await self.release.wait()
        return web.json_response({"success": True, "message": ""})

    async def _model_info(self, body: dict[str, Any]) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def _server_info(self, body: dict[str, Any]) -> web.Response:
        usual = {"context_length": LONGEST + 8, "max_total_num_tokens": 4096, "disable_overlap_schedule": True}
        return web.json_response({**usual, **self.settings})


@asynccontextmanager
async def serving(answer: Handler, port: int = 0) -> AsyncIterator[str]:
    """Serve every path with ``answer``; yields the URL."""
    app = web.Application()
    app.router.add_route("*", "/{path}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def write_folder(folder: Path) -> Path:
    """A policy folder with a config and one tensor without a byte."""
    folder.mkdir()
    config = {"vocab_size": VOCAB, "max_position_embeddings": LONGEST, "model_type": "qwen3"}
    (folder / "config.json").write_text(json.dumps(config))
    header = json.dumps({"w": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return folder


def make_engine(server: ScriptedServer, **options: Any) -> SglangEngine:
    fields = {"slots": 4, "max_context_tokens": LONGEST, "url": server.url, "admin_key": "key", **options}
    return SglangEngine(sglang_options(**fields))


def make_call(name: str = "t", count: int = 8, **fields: Any) -> GenerationCall:
    return GenerationCall(
        trajectory_id=name,
        context_ids=np.array([1, 2, 3], np.int32),
        prompt_token_count=3,
        max_new_token_count=count,
        chunk_token_count=4,
        sampling=SamplingParams(),
        **fields,
    )
