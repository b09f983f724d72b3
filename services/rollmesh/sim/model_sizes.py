"""Sizes of language models: weights, and cache bytes per token, from their Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollmesh.errors import ConfigError
from rollmesh.generator.engines.torch.architecture import Architecture, architecture_from_config, read_architecture

WEIGHT_BYTES = 2
"""Bytes of a bf16 number: weights and cache of the engines."""


def _config(
    family: str, hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, vocab: int, *, tied: bool = False
) -> Mapping[str, Any]:
    """Return the fields of ``config.json`` that decide sizes; a head has 128 numbers in all models but the smallest."""
    return {
        "model_type": family,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "head_dim": 64 if hidden == 896 else 128,
        "max_position_embeddings": 32_768,
    }


MODELS: Mapping[str, Mapping[str, Any]] = {
    "qwen2.5-0.5b": _config("qwen2", 896, 24, 14, 2, 4864, 151_936, tied=True),
    "qwen2.5-1.5b": _config("qwen2", 1536, 28, 12, 2, 8960, 151_936, tied=True),
    "r1-distill-qwen-1.5b": _config("qwen2", 1536, 28, 12, 2, 8960, 151_936),
    "qwen2.5-7b": _config("qwen2", 3584, 28, 28, 4, 18_944, 152_064),
    "qwen2.5-14b": _config("qwen2", 5120, 48, 40, 8, 13_824, 152_064),
    "qwen2.5-32b": _config("qwen2", 5120, 64, 40, 8, 27_648, 152_064),
    "qwen3-4b": _config("qwen3", 2560, 36, 32, 8, 9728, 151_936, tied=True),
    "qwen3-8b": _config("qwen3", 4096, 36, 32, 8, 12_288, 151_936),
    "qwen3-14b": _config("qwen3", 5120, 40, 40, 8, 17_408, 151_936),
    "qwen3-32b": _config("qwen3", 5120, 64, 64, 8, 25_600, 151_936),
}
"""Configurations by name, from memory of the models' config.json; a folder given as --model is read instead.

R1-Distill-Qwen-7B has the shape of Qwen2.5-7B.
"""

ALIASES: Mapping[str, str] = {
    "0.5b": "qwen2.5-0.5b",
    "1.5b": "r1-distill-qwen-1.5b",
    "7b": "qwen2.5-7b",
    "8b": "qwen3-8b",
    "14b": "qwen2.5-14b",
    "32b": "qwen2.5-32b",
    "r1-distill-qwen-7b": "qwen2.5-7b",
}


def find_model(name: str) -> Architecture:
    """Return a model of the table, or that of a Hugging Face folder. Raises ConfigError with the known names."""
    known = name.lower()
    config = MODELS.get(ALIASES.get(known, known))
    if config is not None:
        return architecture_from_config(config)
    if (Path(name) / "config.json").is_file():
        return read_architecture(Path(name))
    raise ConfigError(
        f"model={name}: neither a folder with config.json nor in the table; known are {', '.join((*MODELS, *ALIASES))}"
    )


def weight_count(model: Architecture) -> int:
    """Return the number of weights."""
    hidden, heads, kv_heads, head = model.hidden_size, model.head_count, model.kv_head_count, model.head_size
    attention = 2 * hidden * heads * head + 2 * hidden * kv_heads * head
    biases = (heads + 2 * kv_heads) * head * model.qkv_bias + hidden * model.output_bias
    norms = 2 * hidden + 2 * head * model.qk_norm
    layer = attention + biases + norms + 3 * hidden * model.mlp_size
    embeddings = model.vocab_size * hidden * (1 if model.tied_head else 2)
    return embeddings + model.layer_count * layer + hidden


def multiplied_weight_count(model: Architecture) -> int:
    """Return the number of weights that every token is multiplied with: all but an input embedding of its own."""
    return weight_count(model) - (0 if model.tied_head else model.vocab_size * model.hidden_size)


def kv_bytes_per_token(model: Architecture, tensor_parallel: int = 1) -> int:
    """Return the cache bytes of one token on each device; a key-value head is never split between devices."""
    kv_heads = -(-model.kv_head_count // tensor_parallel)
    return 2 * model.layer_count * kv_heads * model.head_size * WEIGHT_BYTES
