"""One thread, tiny random models on disk, and engines that are always closed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config
from transformers.utils.logging import disable_progress_bar

from rollmesh.config.generator import GeneratorConfig
from rollmesh.generator.engines.torch.torch_engine import TorchEngine
from rollmesh.types import Chunk, FinishReason, Float32Array, GenerationCall, Int32Array, SamplingParams

from ...kit.models import write_model

VOCAB = 61
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen2": lambda: Qwen2Config(**_SHAPE, num_key_value_heads=1, tie_word_embeddings=True),
    "qwen2-untied-grouped": lambda: Qwen2Config(**_SHAPE, num_key_value_heads=2, tie_word_embeddings=False),
    "qwen3": lambda: Qwen3Config(**_SHAPE, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(**_SHAPE, num_key_value_heads=4, rope_parameters={"rope_theta": 5000.0}),
    "llama3-biased": lambda: LlamaConfig(
        **_SHAPE, num_key_value_heads=2, attention_bias=True, rope_parameters=dict(_LLAMA3)
    ),
}


@dataclass(frozen=True)
class Rollout:
    """Chunks that one call streamed."""

    chunks: list[Chunk]

    @property
    def tokens(self) -> Int32Array:
        return np.concatenate([c.token_ids for c in self.chunks])

    @property
    def logprobs(self) -> Float32Array:
        return np.concatenate([c.behavior_logprobs for c in self.chunks])

    @property
    def reason(self) -> FinishReason | None:
        return self.chunks[-1].finish_reason


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    disable_progress_bar()
    yield
    torch.set_num_threads(threads)


ModelMaker = Callable[..., Path]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> ModelMaker:
    """``model_folder("qwen3", seed=1)``: a Hugging Face folder, written once."""
    known: dict[tuple[str, int], Path] = {}

    def make(name: str = "qwen2", seed: int = 0) -> Path:
        if (name, seed) not in known:
            known[name, seed] = write_model(tmp_path_factory.mktemp(name), CONFIGS[name](), seed)
        return known[name, seed]

    return make


@pytest.fixture
async def engine_of(model_folder: ModelMaker) -> AsyncIterator[Callable[..., object]]:
    """``await engine_of("qwen2", slots=4)``: a started engine, closed at the end of the test."""
    engines: list[TorchEngine] = []

    async def make(name: str = "qwen2", seed: int = 0, version: int = 0, **options: object) -> TorchEngine:
        dtype, adapter = str(options.pop("dtype", "float32")), options.pop("adapter", None)
        settings: dict[str, object] = {"slots": 8, "max_context_tokens": 256, "device": "cpu", **options}
        engine = TorchEngine(GeneratorConfig(**settings), dtype, adapter)  # type: ignore[arg-type]
        engines.append(engine)
        await engine.start(model_folder(name, seed), version)
        return engine

    yield make
    for engine in engines:
        await engine.aclose()


def prompt_ids(seed: int, count: int = 12) -> Int32Array:
    return np.random.default_rng(seed).integers(0, VOCAB, count).astype(np.int32)


def make_call(trajectory_id: str = "t", context: Int32Array | None = None, **changes: object) -> GenerationCall:
    """A call; keyword arguments are fields of GenerationCall or of SamplingParams."""
    ids = prompt_ids(0) if context is None else context
    sampling = {k: changes.pop(k) for k in list(changes) if k in SamplingParams.__dataclass_fields__}
    fields: dict[str, object] = {
        "prompt_token_count": len(ids),
        "max_new_token_count": 40,
        "chunk_token_count": 8,
        "sampling": SamplingParams(**{"seed": 7, **sampling}),  # type: ignore[arg-type]
        **changes,
    }
    return GenerationCall(trajectory_id=trajectory_id, context_ids=ids, **fields)  # type: ignore[arg-type]


async def collect(engine: TorchEngine, call: GenerationCall) -> Rollout:
    return Rollout([chunk async for chunk in engine.generate(call)])


@cache
def _reference(folder: Path) -> PreTrainedModel:
    """The model of a folder that no test changes, as transformers computes it."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def hf_logprobs(folder: Path, ids: Int32Array, temperature: float = 1.0) -> Float32Array:
    """log_softmax(z / T) of every token after the first, by plain teacher forcing, float32 [tokens - 1]."""
    model = _reference(folder)
    with torch.inference_mode():
        tokens = torch.from_numpy(ids.astype(np.int64))
        logprobs = torch.log_softmax(model(tokens[None]).logits[0] / (temperature or 1.0), dim=-1)
        return logprobs[:-1].gather(1, tokens[1:, None]).squeeze(1).numpy()
