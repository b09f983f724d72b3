"""Runs with a teacher: its model, a running service, calls, and the scores that plain transformers gives."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from rollmesh.config.load import validate_run_config
from rollmesh.config.run import RunConfig
from rollmesh.runtime.endpoints import Endpoint, read_endpoints
from rollmesh.runtime.grpc import create_channel
from rollmesh.teacher.main import serve
from rollmesh.teacher.teacher_model import manifest_digest
from rollmesh.types import Float64Array, Int32Array
from rollmesh.v1 import teacher_service_pb2 as pb
from rollmesh.v1 import teacher_service_pb2_grpc as stubs
from rollmesh.wire.codec import teacher_from_pb, tensor_to_pb

from ...kit.answers import byte_tokenizer
from ...kit.environments import python_of
from ...kit.models import write_model
from ...kit.waiting import reached
from ...sglang_cpu.server import FORKING, START_SECONDS

WAIT_SECONDS = 120.0
CONTEXT, VOCAB = 96, 256
TEACHER = "wise"
STAND_IN = {"environment": {"PYTHONPATH": str(Path(__file__).parents[2] / "fakes"), "OMP_NUM_THREADS": "1"}}
"""SGLang section of the stand-in: found first on the server's path."""


def real_server() -> dict[str, Any]:
    """SGLang section of the real server; skips where it is not installed."""
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", **FORKING}
    return {
        "python": str(python_of("sglang-cpu")),
        "environment": environment,
        "start_timeout_seconds": START_SECONDS,
    }


def write_teacher(folder: Path, seed: int = 0, *, tokens: Sequence[str] = (), **settings: Any) -> Path:
    """A random model with one token per byte, and ``tokens`` added to them."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
    write_model(folder, Qwen2Config(**sizes | settings), seed)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(list(tokens))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def make_config(folder: Path, temperature: float = 1.0, **teacher: Any) -> RunConfig:
    """A run with a teacher; both models are made unless they are there."""
    for name, seed in (("policy", 1), ("teacher", 2)):
        if not (folder / name).is_dir():
            write_teacher(folder / name, seed)
    settings = {
        "name": "teacher-test",
        "folder": str(folder / "run"),
        "model": {"path": str(folder / "policy")},
        "data": {"max_prompt_tokens": 32, "source": {"type": "jsonl", "path": "unused"}},
        "rollout": {"max_new_tokens": 32, "temperature": temperature},
        "generator": {"max_context_tokens": CONTEXT, "device": "cpu"},
        "trainer": {"algorithm": {"teacher": {"reverse_kl_coefficient": 1.0}}},
        "teachers": {TEACHER: {"model": str(folder / "teacher"), "device": "cpu", **teacher}},
    }
    return validate_run_config(settings, "test")


@asynccontextmanager
async def running_service(config: RunConfig, wait_seconds: float = WAIT_SECONDS) -> AsyncIterator[Endpoint]:
    """Run a teacher in this process until the block ends."""
    shutdown = asyncio.Event()
    task = asyncio.create_task(serve(config, 0, shutdown, name=TEACHER))
    try:
        found = await reached(
            lambda: read_endpoints(Path(config.folder), f"teacher-{TEACHER}"),
            "the teacher",
            wait_seconds,
            check=lambda: task.done() and task.result(),
        )
        yield found[0]
    finally:
        shutdown.set()
        await asyncio.wait_for(task, WAIT_SECONDS)


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[stubs.TeacherServiceStub]:
    """A stub of the service at an address."""
    async with create_channel(address) as channel:
        yield stubs.TeacherServiceStub(channel)


async def scored(
    stub: stubs.TeacherServiceStub,
    sequences: Sequence[tuple[Int32Array, int]],
    temperature: float = 1.0,
    top_k: int = 0,
    then: Callable[[], object] = lambda: None,
) -> list[pb.ScoreTokensResponse]:
    """Score (ids, length of the prompt) in one call; the answers in the order of the request.

    ``then`` is called after the first answer."""
    items = [
        pb.TokenScoreItem(trajectory_id=f"t{n}", token_ids=tensor_to_pb(ids), prompt_token_count=prompt)
        for n, (ids, prompt) in enumerate(sequences)
    ]
    request = pb.ScoreTokensRequest(items=items, temperature=temperature, top_k=top_k)
    answers = []
    async for answer in stub.ScoreTokens(request, timeout=WAIT_SECONDS):
        answers.append(answer)
        if len(answers) == 1:
            then()
    assert sorted(a.item_index for a in answers) == list(range(len(items)))
    return sorted(answers, key=lambda answer: answer.item_index)


def random_sequences(count: int, seed: int = 0) -> list[tuple[Int32Array, int]]:
    """Members of two groups, each with a long prompt in common, and one of a short prompt."""
    draw = np.random.default_rng(seed)

    def ids(length: int) -> Int32Array:
        return draw.integers(0, VOCAB, length).astype(np.int32)

    prompts = [ids(50), ids(40), ids(1)]
    return [(np.concatenate([p := prompts[n % 3], ids(5 + n % 40)]), len(p)) for n in range(count)]


def assert_columns(
    folder: Path,
    sequences: Sequence[tuple[Int32Array, int]],
    answers: Sequence[pb.ScoreTokensResponse],
    temperature: float,
    top_k: int,
) -> None:
    """Compare columns with plain transformers, to 1e-5 in float32."""
    for (ids, prompt), answer in zip(sequences, answers, strict=True):
        assert answer.message == ""
        column = teacher_from_pb(answer.column)
        rows = reference(folder, ids, prompt, temperature)
        np.testing.assert_allclose(column.logprobs, rows[np.arange(len(rows)), ids[prompt:]], rtol=0, atol=1e-5)
        assert (column.teacher, column.manifest_digest) == (TEACHER, manifest_digest(folder))
        assert column.top_ids is not None and column.top_logprobs is not None
        np.testing.assert_array_equal(column.top_ids, np.argsort(-rows, axis=-1)[:, :top_k])
        np.testing.assert_allclose(column.top_logprobs, -np.sort(-rows, axis=-1)[:, :top_k], rtol=0, atol=1e-5)


@torch.no_grad()
def last_hidden(folder: Path, ids: Int32Array) -> torch.Tensor:
    """What the head reads at every token, [tokens, width]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    states: torch.Tensor = model.model(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).last_hidden_state[0]
    return states


@torch.no_grad()
def reference(folder: Path, ids: Int32Array, prompt: int, temperature: float) -> Float64Array:
    """log_softmax(z/T) of the whole vocabulary at every response token by plain transformers, float64 of float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
    rows: Float64Array = torch.log_softmax(logits[prompt - 1 : -1].double() / temperature, -1).numpy()
    return rows
