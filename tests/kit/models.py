"""Random models on disk."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig


def write_model(
    folder: Path, config: PretrainedConfig, seed: int = 0, *, scale: float = 5.0, shift: float = 0.2
) -> Path:
    """Write a random model whose distributions are neither flat nor certain, and whose norms and biases matter.

    Matrices are multiplied by ``scale`` (as initialised they give nearly uniform distributions, which would hide
    errors), and ``shift`` times normal noise is added to vectors.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
            elif shift:
                parameter.add_(shift * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder
