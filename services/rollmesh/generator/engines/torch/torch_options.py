"""Options of the torch engine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rollmesh.config.run import RunConfig
from rollmesh.errors import ConfigError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchEngineOptions:
    """Sizes and device of one engine."""

    slots: int
    """Maximum number of calls decoded at once."""
    max_context_tokens: int
    """Maximum tokens of prompt plus response of one call."""
    kv_token_capacity: int | None = None
    """Tokens of key-value cache; None is slots * max_context_tokens."""
    device: str = "auto"
    """``cpu``, ``cuda``, ``cuda:1`` or ``auto``: CUDA if available."""
    dtype: str = "float32"
    """``float32`` or ``bfloat16``."""
    prefill_token_budget: int = 2048
    """Prefilled tokens (padding included) between two decode steps."""
    forward_token_limit: int | None = None
    """Tokens of one prefill or scoring pass; None is 256 on a CPU, where they fit in its cache, else 8192."""
    pace: tuple[tuple[int, float], ...] | None = None
    """Step-time curve [(running calls, seconds)], piecewise linear; None runs at full speed."""
    cuda_graphs: bool = False
    """Decode with CUDA graphs, one per bucket of rows; a CPU runs the same padded steps without capture."""

    def __post_init__(self) -> None:
        if self.kv_tokens < self.max_context_tokens:
            raise ConfigError(
                f"generator.kv_token_capacity={self.kv_token_capacity} does not hold one call of "
                f"generator.max_context_tokens={self.max_context_tokens}; increase it or leave it out"
            )

    @classmethod
    def from_config(cls, config: RunConfig) -> TorchEngineOptions:
        """Build the options from a run file."""
        generator = config.generator
        return cls(
            slots=generator.slots,
            max_context_tokens=generator.max_context_tokens,
            kv_token_capacity=generator.kv_token_capacity,
            device=generator.device,
            dtype=config.model.dtype,
            pace=tuple(sorted(generator.pace)) if generator.pace else None,
            cuda_graphs=generator.cuda_graphs,
        )

    @property
    def kv_tokens(self) -> int:
        """Tokens of key-value cache."""
        return self.kv_token_capacity or self.slots * self.max_context_tokens

    def forward_tokens(self, device: torch.device) -> int:
        """Return the tokens of one prefill or scoring pass on ``device``."""
        return self.forward_token_limit or (256 if device.type == "cpu" else 8192)

    def torch_device(self) -> torch.device:
        """Resolve ``auto``; ConfigError if CUDA is requested and absent."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ConfigError(
                f"generator.device={self.device}: this machine or this build of torch has no CUDA; set cpu or auto"
            )
        return torch.device(self.device)

    def torch_dtype(self) -> torch.dtype:
        """Return the compute dtype."""
        return _DTYPES[self.dtype]

    def step_seconds(self, running: int) -> float:
        """Return the minimum duration of a decode step with ``running`` calls."""
        if not self.pace:
            return 0.0
        counts, seconds = zip(*self.pace, strict=True)
        return float(np.interp(running, counts, seconds))
