"""Random models on disk."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config


def tiny_qwen2(vocab_size: int, **fields: Any) -> Qwen2Config:
    """The shape of a model of some ten thousand parameters, but for these fields."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "tie_word_embeddings": True, "max_position_embeddings": 512}
    return Qwen2Config(vocab_size=vocab_size, **shape | fields)


def write_model(
    folder: Path, config: PretrainedConfig, seed: int = 0, *, scale: float = 5.0, shift: float = 0.2
) -> Path:
    """Write a random model whose distributions are neither flat nor certain, and whose norms and biases matter.

    Matrices are multiplied by ``scale`` (as initialised they give nearly uniform distributions, which would hide
    errors), and ``shift`` times normal noise is added to vectors.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
            elif shift:
                parameter.add_(shift * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder
