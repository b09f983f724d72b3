"""``PolicyScorer``: log-probabilities under a published policy, without an optimizer. For audits and comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch

from rollmesh.trainer.distributed import Gang, pick_device
from rollmesh.trainer.model import PolicyModel, load_policy_model
from rollmesh.trainer.packing import balanced_bins, pack_sequences
from rollmesh.trainer.passes import Compute
from rollmesh.types import Float32Array, Int32Array


class PolicyScorer:
    """A policy in float32 that only scores; one process."""

    def __init__(self, model: PolicyModel, compute: Compute) -> None:
        self._model = model
        self._compute = compute

    @classmethod
    def from_folder(cls, folder: str | Path, *, device: str = "auto", tokens_per_microbatch: int = 4096) -> Self:
        """Load a Hugging Face folder, whatever dtype it holds, in float32; CheckpointError when it cannot be read."""
        gang = Gang()
        place = pick_device(device, gang.local_rank)
        model = load_policy_model(Path(folder), dtype=torch.float32, device=place)
        model.requires_grad_(False)
        return cls(model, Compute(device=place, gang=gang, token_budget=tokens_per_microbatch, autocast=False))

    def logprobs(self, sequences: Sequence[Int32Array], temperature: float = 1.0) -> list[Float32Array]:
        """``log_softmax(z / T)`` of each token given its predecessors, float32 [tokens - 1] per sequence."""
        return score_sequences(self._model, self._compute, sequences, temperature)


@torch.no_grad()
def score_sequences(
    model: PolicyModel, compute: Compute, sequences: Sequence[Int32Array], temperature: float
) -> list[Float32Array]:
    """Packed scoring of sequences of at least 2 tokens, in the order given; every rank computes all of them."""
    results: list[Float32Array] = [np.empty(0, np.float32)] * len(sequences)
    for indices in balanced_bins([len(s) for s in sequences], compute.token_budget):
        micro = pack_sequences([sequences[i] for i in indices], temperature, compute.device)
        with compute.precision():
            values = model.score(micro, entropy=False)[0].float().cpu().numpy()
        edges = np.cumsum([len(sequences[i]) - 1 for i in indices])[:-1]
        for i, part in zip(indices, np.split(values, edges), strict=True):
            results[i] = part
    return results
