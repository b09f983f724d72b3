"""Generator section: the engine and its sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from rollmesh.config.section import EngineSection, Section
from rollmesh.config.sglang_server import SglangConfig

ENGINE_SECTIONS: Mapping[str, type[EngineSection]] = {"torch": EngineSection, "sglang": SglangConfig}
"""Section of each engine: the field of ``GeneratorConfig`` with the engine's name; the torch engine has none."""


class GeneratorConfig(Section):
    """Generation."""

    replicas: int = Field(default=1, ge=0)
    """Generator processes that the launcher starts."""
    engine: Literal["torch", "sglang"] = "torch"
    """torch: the embedded engine; sglang: an SGLang server, see ``sglang``, with rollout.partial_save_tokens=1024 by
    default."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the engine; auto leaves the choice to the engine, which uses CUDA when available."""
    slots: int = Field(default=64, ge=1, le=65_536)
    """Maximum number of calls that one generator decodes at once."""
    max_context_tokens: int = Field(default=2048, ge=2)
    """Maximum length of prompt plus response; longer requests are rejected."""
    kv_token_capacity: int | None = Field(default=None, ge=1)
    """Tokens of KV cache; null is slots * max_context_tokens."""
    on_new_version: Literal["interrupt", "keep_kv", "drain", "next_slice"] = "interrupt"
    """Effect of a new policy version on running calls. next_slice is for adapters, and the only value and the default
    with model.adapter: nothing pauses, running calls finish on their version, later ones use the new one."""
    reload_at_once: int | None = Field(default=None, ge=1)
    """Generators that load a new version at the same time (DART: 1); the others serve their old version until it is
    their turn. null: no limit. A generator that may not keep its version loads at once: it starts, is pinned, or its
    version is older than new trajectories may start on."""
    reload_every_versions: int = Field(default=1, ge=1)
    """k: generators load the newest version once k versions have passed a multiple of k; saves reloads, costs up to
    k - 1 steps of staleness. A version that new trajectories need, the last one and a pinned one are loaded always."""
    canary_threshold: float | None = Field(default=None, gt=0)
    """Largest logprob gap on the manifest's canary sequences, in nats, above which the generator stops serving; null
    uses the value for model.dtype (float32 0.005, bfloat16 0.5)."""
    refused_versions_limit: int = Field(default=3, ge=1)
    """Number of consecutive policy versions refused by every generator that ends the run. The run also ends when all
    generators refuse the newest version for launcher.start_timeout_seconds."""
    drain_timeout_seconds: float = Field(default=20.0, gt=0)
    """Time after SIGTERM for running streams to end as interrupted; no sampled token is lost."""
    pace: list[tuple[int, float]] | None = None
    """Step-time curve [(running calls, seconds)], to which every decode step is slowed down by sleeping; emulates
    latency in experiments."""
    cuda_graphs: bool = False
    """engine=torch on a GPU: decode with CUDA graphs, one per bucket of rows, instead of one launch per operation. Not
    yet run on a GPU. On a CPU the same padded steps run without capture; slower, for tests."""
    sglang: SglangConfig = Field(default_factory=SglangConfig)
    """SGLang server."""

    @property
    def engine_section(self) -> EngineSection:
        """Section of ``engine``, with its rules for the other fields."""
        section: EngineSection = getattr(self, self.engine, EngineSection())
        return section

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV cache of one generator."""
        return self.kv_token_capacity or self.slots * self.max_context_tokens

    @model_validator(mode="after")
    def _the_engine_can_do_it(self) -> Self:
        for name in type(self).model_fields:
            if reason := self.engine_section.problem(name, getattr(self, name)):
                raise ValueError(f"generator.{name}={getattr(self, name)}: {reason}")
        return self

    @model_validator(mode="after")
    def _the_cache_holds_one_call(self) -> Self:
        if self.kv_tokens < self.max_context_tokens:
            raise ValueError(
                f"generator.kv_token_capacity={self.kv_token_capacity} does not hold one call of "
                f"generator.max_context_tokens={self.max_context_tokens}; increase it or leave it out"
            )
        return self
