"""One thread, tiny random models on disk, and engines that are always closed."""

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config
from transformers.utils.logging import disable_progress_bar

from rollmesh.config.generator import GeneratorConfig
from rollmesh.generator.engines.torch.torch_engine import TorchEngine

from ...kit.generation import VOCAB
from ...kit.models import write_model

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
