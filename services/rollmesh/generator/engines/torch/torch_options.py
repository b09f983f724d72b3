"""Meaning of fields of the run file's ``generator`` section for the torch engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rollmesh.errors import ConfigError

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Compute dtype by ``model.dtype``."""


def torch_device(name: str) -> torch.device:
    """Return the device for ``generator.device``, CUDA for ``auto`` if available; ConfigError if CUDA is absent."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"generator.device={name}: this machine or this build of torch has no CUDA; set cpu or auto")
    return torch.device(name)


def forward_tokens(device: torch.device) -> int:
    """Return the tokens of one prefill or scoring pass on ``device``; 256 fit in the cache of a CPU."""
    return 256 if device.type == "cpu" else 8192


def step_seconds(pace: Sequence[tuple[int, float]] | None, running: int) -> float:
    """Return the minimum duration of a decode step with ``running`` calls: piecewise linear, 0 without a curve."""
    if not pace:
        return 0.0
    counts, seconds = zip(*sorted(pace), strict=True)
    return float(np.interp(running, counts, seconds))
