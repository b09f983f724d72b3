"""Workload of every arm of ``bench gpu``: prompts, response lengths and rewards, fixed per (group, member).

Lengths are fixed: a call samples the remaining tokens of its trajectory and has no stop ids. A random model has no
meaningful length distribution, and different weights must not give an arm shorter work.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rollmesh.types import Prompt

_LENGTHS, _PROMPTS, _REWARDS = 1, 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Shape of a Qwen2 model."""

    name: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    mlp_size: int
    max_positions: int


QWEN2_5_05B = Shape(
    name="Qwen2.5-0.5B",
    vocab_size=151_936,
    hidden_size=896,
    layers=24,
    heads=14,
    kv_heads=2,
    mlp_size=4864,
    max_positions=32_768,
)
TINY = Shape(name="tiny", vocab_size=64, hidden_size=32, layers=2, heads=2, kv_heads=1, mlp_size=48, max_positions=512)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Deterministic prompts, lengths and rewards of an endless stream of groups."""

    vocab_size: int
    prompt_tokens: int
    median_length: int
    sigma: float
    longest: int
    seed: int = 0

    @property
    def context_tokens(self) -> int:
        """Tokens of a prompt and the longest response."""
        return self.prompt_tokens + self.longest

    def length(self, group: int, member: int) -> int:
        """Return the response tokens of one trajectory: lognormal, 4 to ``longest``."""
        draw = self._random(_LENGTHS, group, member).normal(np.log(self.median_length), self.sigma)
        return int(np.clip(np.exp(draw), 4, self.longest))

    def prompt(self, group: int) -> Prompt:
        """Return the prompt of a group: random token ids."""
        ids = self._random(_PROMPTS, group).integers(0, self.vocab_size, self.prompt_tokens)
        return Prompt(prompt_id=str(group), token_ids=ids.astype(np.int32), verifier="exact")

    def reward(self, group: int, member: int) -> float:
        """Return 0 or 1, by key: the gradients are real but carry no signal."""
        return float(self._random(_REWARDS, group, member).integers(0, 2))

    def _random(self, *key: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, *key))


def write_random_model(folder: Path, shape: Shape, dtype: str) -> int:
    """Write a randomly initialised model as a Hugging Face folder; return its number of parameters."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.mlp_size,
        max_position_embeddings=shape.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    torch.nn.Module.to(model, getattr(torch, dtype))
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())
