"""Weights of the next policy version, beside those in use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from rollmesh.generator.engines.torch.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedWeights:
    """Weights in host memory that were read, and that one swap puts in use."""

    folder: Path
    policy_version: int
    weights: Weights

    def scorable_on(self, device: torch.device) -> bool:
        """Tell whether ``device`` can compute with the weights before the swap, which copies them to a GPU."""
        return self.weights.embedding.device.type == device.type
