"""Model section: the initial policy, and the adapter that is trained above it."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rollmesh.config.section import Section

ModuleName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
"""Last part of a linear layer's name, for example ``q_proj``."""


class AdapterConfig(Section):
    """Low-rank adapter: each adapted layer computes ``W x + alpha / rank * B A x``, and only A and B are trained.

    Source: LoRA (Hu et al., 2021).
    """

    rank: int = Field(default=16, ge=1, le=512)
    """Rows of A and columns of B. The engines reserve memory for this rank when they start."""
    alpha: int = Field(default=32, ge=1)
    """Numerator of the adapter's scale."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of A's inputs that are dropped in training; above 0, on-policy ratios differ from 1, and step
    reports have no logprob gap."""
    target: Literal["all_linear"] | tuple[ModuleName, ...] = "all_linear"
    """Adapted layers: every linear layer of the transformer blocks, or those with these names."""

    @model_validator(mode="after")
    def _targets_are_adaptable(self) -> Self:
        if self.target == ():
            raise ValueError("target: name at least one linear layer, or use all_linear")
        if "lm_head" in self.target:
            raise ValueError("target: lm_head cannot be adapted; name linear layers of the transformer blocks")
        return self


class ModelConfig(Section):
    """Initial policy."""

    path: str
    """Hugging Face folder (config.json, safetensors, tokenizer); ``recipe:NAME`` is a model packaged with rollmesh."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of published weights and of the engine."""
    adapter: AdapterConfig | None = None
    """Train a low-rank adapter above the frozen weights of ``path``; null trains all weights."""
