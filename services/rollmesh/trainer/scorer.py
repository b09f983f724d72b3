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
from rollmesh.types import Float32Array, Float64Array, Int32Array

_RESOLUTION_DRAWS = 6
_FLOAT32_ULP = 2.0**-23


class PolicyScorer:
    """A policy that only scores; one process."""

    def __init__(self, model: PolicyModel, compute: Compute) -> None:
        self._model = model
        self._compute = compute

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        *,
        device: str = "auto",
        dtype: torch.dtype = torch.float32,
        tokens_per_microbatch: int = 4096,
    ) -> Self:
        """Load a Hugging Face folder, whatever dtype it holds, in ``dtype``; CheckpointError when it cannot be read.

        float64 gives the policy's own value, free of the rounding of float32: what an engine is judged against.
        """
        gang = Gang()
        place = pick_device(device, gang.local_rank)
        model = load_policy_model(Path(folder), dtype=dtype, device=place)
        model.requires_grad_(False)
        return cls(model, Compute(device=place, gang=gang, token_budget=tokens_per_microbatch, autocast=False))

    def logprobs(self, sequences: Sequence[Int32Array], temperature: float = 1.0) -> list[Float32Array]:
        """``log_softmax(z / T)`` of each token given its predecessors, float32 [tokens - 1] per sequence."""
        return score_sequences(self._model, self._compute, sequences, temperature)

    def resolution(self, sequences: Sequence[Int32Array], temperature: float = 1.0) -> list[Float64Array]:
        """How far the last float32 bit of the weights moves each log-probability, float64 [tokens - 1] per sequence.

        The largest change over a few draws in which every weight is multiplied by 1 + u * 2**-23, u uniform in
        [-1, 1): a backward error that any float32 program makes. Wants a scorer in float64, whose own rounding is far
        below; the weights are put back.
        """
        exact = [values.astype(np.float64) for values in self.logprobs(sequences, temperature)]
        moved = [np.zeros_like(values) for values in exact]
        kept = [parameter.detach().clone() for parameter in self._model.parameters()]
        generator = torch.Generator().manual_seed(0)
        for _ in range(_RESOLUTION_DRAWS):
            for parameter, weight in zip(self._model.parameters(), kept, strict=True):
                noise = torch.rand(weight.shape, generator=generator, dtype=torch.float64) * 2 - 1
                parameter.data.copy_(weight * (1 + _FLOAT32_ULP * noise.to(weight.device)))
            for largest, values, centre in zip(moved, self.logprobs(sequences, temperature), exact, strict=True):
                np.maximum(largest, np.abs(values - centre), out=largest)
        for parameter, weight in zip(self._model.parameters(), kept, strict=True):
            parameter.data.copy_(weight)
        return moved


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
