"""Model section: the initial policy."""

from __future__ import annotations

from typing import Literal

from rollmesh.config.adapter import AdapterConfig
from rollmesh.config.section import Section


class ModelConfig(Section):
    """Initial policy."""

    path: str
    """Hugging Face folder (config.json, safetensors, tokenizer); ``recipe:NAME`` is a model packaged with rollmesh."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of published weights and of the engine."""
    adapter: AdapterConfig | None = None
    """Train a low-rank adapter above the frozen weights of ``path``; null trains all weights."""
