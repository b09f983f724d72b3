"""``PolicyScorer``: log-probabilities under a published policy, without an optimizer. For audits and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rollmesh.trainer.learner.distributed import World, pick_device
from rollmesh.trainer.learner.forward_backward import Compute
from rollmesh.trainer.learner.packing import balanced_bins, pack_sequences
from rollmesh.trainer.learner.policy_model import PolicyModel, load_policy_model
from rollmesh.types import Float32Array, Float64Array, FloatArray, Int32Array

_RESOLUTION_DRAWS = 6
_FLOAT32_ULP = 2.0**-23


class PolicyScorer:
    """A policy that only scores; one process."""

    def __init__(self, model: PolicyModel, compute: Compute) -> None:
        self._model = model
        self._compute = compute
        self._exact = next(model.parameters()).dtype == torch.float64

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

        float64 gives the policy's own value, free of the rounding of float32: what an engine is judged against. Norms
        and rotary tables are in float64 too, which a model computes in float32 by itself.
        """
        gang = World()
        place = pick_device(device, gang.local_rank)
        model = load_policy_model(Path(folder), dtype=dtype, device=place)
        model.requires_grad_(False)
        return cls(model, Compute(device=place, gang=gang, token_budget=tokens_per_microbatch, autocast=False))

    def logprobs(self, sequences: Sequence[Int32Array], temperature: float = 1.0) -> list[FloatArray]:
        """``log_softmax(z / T)`` of each token given its predecessors, [tokens - 1] per sequence, in its own dtype."""
        with _Float64() if self._exact else nullcontext():
            return _scores(self._model, self._compute, sequences, temperature)

    def resolution(self, sequences: Sequence[Int32Array], temperature: float = 1.0) -> list[Float64Array]:
        """How far the last float32 bit of the weights moves each log-probability, float64 [tokens - 1] per sequence.

        The largest change over a few draws in which every weight, and every position that goes into a rotary table, is
        multiplied by 1 + u * 2**-23, u uniform in [-1, 1): a backward error that any float32 program makes. Wants a
        scorer in float64, whose own rounding is far below; the weights are put back.
        """
        exact = self.logprobs(sequences, temperature)
        moved = [np.zeros(len(values), np.float64) for values in exact]
        kept = [parameter.detach().clone() for parameter in self._model.parameters()]
        noise = _LastBit(self._model)
        try:
            for _ in range(_RESOLUTION_DRAWS):
                for parameter, weight in zip(self._model.parameters(), kept, strict=True):
                    parameter.data.copy_(noise.on(weight))
                for largest, values, centre in zip(moved, self.logprobs(sequences, temperature), exact, strict=True):
                    np.maximum(largest, np.abs(values - centre), out=largest)
        finally:
            noise.end()
            for parameter, weight in zip(self._model.parameters(), kept, strict=True):
                parameter.data.copy_(weight)
        return moved


class _Float64(TorchFunctionMode):
    """Computes in float64 where a model asks for float32, as its norms and rotary tables do whatever its dtype."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        exact = tuple(torch.float64 if value is torch.float32 else value for value in args)
        named = {k: torch.float64 if value is torch.float32 else value for k, value in (kwargs or {}).items()}
        return func(*exact, **named)


class _LastBit:
    """Noise in the last float32 bit: of weights on request, of the positions of rotary tables until ``end``."""

    def __init__(self, model: PolicyModel) -> None:
        self._generator = torch.Generator().manual_seed(0)
        rotary = (module for module in model.modules() if hasattr(module, "inv_freq"))
        self._hooks = [module.register_forward_pre_hook(self._shift, with_kwargs=True) for module in rotary]

    def on(self, values: Tensor) -> Tensor:
        """The values times 1 + u * 2**-23, in float64."""
        noise = torch.rand(values.shape, generator=self._generator, dtype=torch.float64) * 2 - 1
        return values * (1 + _FLOAT32_ULP * noise.to(values.device))

    def end(self) -> None:
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()

    def _shift(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments of a rotary embedding, ``(x, position_ids)``, with other positions."""
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": self.on(kwargs["position_ids"].double())}
        return (args[0], self.on(args[1].double()), *args[2:]), kwargs


def score_sequences(
    model: PolicyModel, compute: Compute, sequences: Sequence[Int32Array], temperature: float
) -> list[Float32Array]:
    """Packed scoring of sequences of at least 2 tokens, in the order given; every rank computes all of them."""
    return [values.astype(np.float32, copy=False) for values in _scores(model, compute, sequences, temperature)]


@torch.no_grad()
def _scores(
    model: PolicyModel, compute: Compute, sequences: Sequence[Int32Array], temperature: float
) -> list[FloatArray]:
    results: list[FloatArray] = [np.empty(0, np.float32)] * len(sequences)
    for indices in balanced_bins([len(s) for s in sequences], compute.token_budget):
        micro = pack_sequences([sequences[i] for i in indices], temperature, compute.device)
        with compute.precision():
            values = model.score(micro, entropy=False)[0].cpu().numpy()
        edges = np.cumsum([len(sequences[i]) - 1 for i in indices])[:-1]
        for i, part in zip(indices, np.split(values, edges), strict=True):
            results[i] = part
    return results
