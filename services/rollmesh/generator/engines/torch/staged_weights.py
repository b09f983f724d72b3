"""Weights of the next policy version, beside those in use. Staging on a GPU has not yet run on one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from rollmesh.generator.engines.torch.weights import Weights
from rollmesh.runtime.logging import get_logger

_SPARE_SHARE = 0.1
"""Share of a GPU's memory that staged weights leave free, for the working memory of prefills."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedWeights:
    """Weights that were read, and are scored and put in use by one swap."""

    folder: Path
    policy_version: int
    weights: Weights

    def scorable_on(self, device: torch.device) -> bool:
        """Tell whether ``device`` can compute with the weights before they are swapped in."""
        return self.weights.embedding.device.type == device.type


def staging_device(device: torch.device, in_use: Weights) -> torch.device:
    """Return the device to read the next weights to: that of the weights in use if there is room, else the host."""
    if device.type != "cuda":
        return torch.device("cpu")
    byte_count = sum(tensor.nbytes for tensor in in_use.tensors())
    free, total = torch.cuda.mem_get_info(device)
    # The allocator of torch keeps memory that tensors no longer use, the staged weights before included.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if byte_count + _SPARE_SHARE * total <= free:
        return device
    get_logger("torch-engine").warning("canary_pauses_decoding", weight_bytes=byte_count, free_gpu_bytes=free)
    return torch.device("cpu")
