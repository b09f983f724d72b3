"""Model section: the initial policy."""

from __future__ import annotations

from typing import Literal

from rollmesh.config.section import Section


class ModelConfig(Section):
    """Initial policy."""

    path: str
    """Hugging Face folder (config.json, safetensors, tokenizer); ``recipe:NAME`` is a model packaged with rollmesh."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of published weights and of the engine."""
