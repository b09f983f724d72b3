"""Published policies as models, and log-probabilities under them without an optimizer."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rollmesh.checkpoints.describe import ADAPTER_WEIGHTS_FILE, read_adapter_settings
from rollmesh.checkpoints.policies import VerifiedPolicy
from rollmesh.checkpoints.states import load_weights
from rollmesh.errors import CheckpointError, ConfigError, Reason
from rollmesh.trainer.learner.adapter_layers import merge_adapter
from rollmesh.trainer.learner.distributed import World, pick_device
from rollmesh.trainer.learner.forward_backward import Compute, score_in_model_dtype
from rollmesh.trainer.learner.packing import pack_sequences
from rollmesh.trainer.learner.policy_files import write_policy_folder
from rollmesh.trainer.learner.policy_model import ModelSource, PolicyModel, load_policy_model
from rollmesh.trainer.learner.prefix_tree import prefix_bins
from rollmesh.types import Float32Array, Float64Array, FloatArray, Int32Array, KeptSets

_RESOLUTION_DRAWS = 6
_TOKENS_PER_MICROBATCH = 4096
_FLOAT32_ULP = 2.0**-23


ResponseScores = tuple[Float32Array, Int32Array, Float32Array]
"""Log-probabilities [tokens] of a response, and the most likely tokens [tokens, top_k] with theirs."""


class PolicyScorer:
    """A policy for scoring only, in one process."""

    def __init__(self, model: PolicyModel, token_budget: int = _TOKENS_PER_MICROBATCH) -> None:
        """Freeze the model, which the scorer takes over."""
        self._model = model.requires_grad_(False)
        first = next(model.parameters())
        self._compute = Compute(device=first.device, world=World(), token_budget=token_budget, autocast=False)
        self._float64 = _Float64(model) if first.dtype == torch.float64 else None

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        *,
        device: str = "auto",
        dtype: torch.dtype = torch.float32,
        tokens_per_microbatch: int = _TOKENS_PER_MICROBATCH,
    ) -> Self:
        """Load a Hugging Face folder of any dtype in ``dtype``. Raises CheckpointError if it cannot be read.

        float64 gives the reference value for engines, without the rounding of float32. Norms, which models compute in
        float32, are then computed in float64 too. Rotary tables keep their float32 values, which belong to the policy:
        transformers computes the same ones for every dtype, and the trainer trains with them.
        """
        torch_device = pick_device(device)
        return cls(load_policy_model(Path(folder), dtype=dtype, device=torch_device), tokens_per_microbatch)

    @classmethod
    def from_policy(cls, policy: VerifiedPolicy, *, device: str = "auto") -> Self:
        """Load a published policy in float32, an adapter above its base; otherwise as ``from_folder``."""
        place, dtype = pick_device(device), torch.float32
        if policy.base is None:
            return cls(load_policy_model(policy.folder, dtype=dtype, device=place))
        return cls(load_adapted(policy.folder, ModelSource(folder=policy.base.folder), dtype=dtype, device=place))

    def in_dtype(self, dtype: torch.dtype) -> Self:
        """Return a copy with the weights in another dtype; what the model keeps in float32, it keeps."""
        model = copy.deepcopy(self._model)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        return type(self)(model, self._compute.token_budget)

    def logprobs(
        self,
        sequences: Sequence[Int32Array],
        temperature: float = 1.0,
        kept_sets: Sequence[KeptSets | None] | None = None,
    ) -> list[FloatArray]:
        """Score each token but the first: ``log_softmax(z / T)``, [tokens - 1] per sequence, in the model's dtype.

        ``kept_sets`` are those of the tokens of each sequence; None for full sampling.
        """
        with self._float64 or nullcontext():
            return score_in_model_dtype(self._model, self._compute, sequences, temperature, kept_sets)

    def share_prefixes(self, longest: int) -> None:
        """Compute once what sequences of up to ``longest`` tokens have in common, if the model's results allow it."""
        self._compute = self._compute.sharing(self._model, "auto", longest)

    def passes(self, sequences: Sequence[Int32Array]) -> list[list[int]]:
        """Divide sequences into the passes of ``response_scores``; those that begin alike stay together."""
        return prefix_bins(sequences, self._compute.token_budget, least_saved=self._compute.least_saved)

    def response_scores(
        self, sequences: Sequence[Int32Array], prompt_token_counts: Sequence[int], temperature: float, top_k: int
    ) -> list[ResponseScores]:
        """Score the tokens after each prompt in one pass, with the ``top_k`` most likely tokens at each."""
        micro = pack_sequences(
            sequences,
            temperature,
            self._compute.device,
            least_saved=self._compute.least_saved,
            unscored=prompt_token_counts,
        )
        logprobs, top_ids, top_logprobs = (values.cpu().numpy() for values in self._model.score_top(micro, top_k))
        columns = (logprobs, top_ids.astype(np.int32), top_logprobs)
        ends = np.cumsum([len(ids) - count for ids, count in zip(sequences, prompt_token_counts, strict=True)])[:-1]
        return list(zip(*(np.split(values, ends) for values in columns), strict=True))

    def resolution(
        self,
        sequences: Sequence[Int32Array],
        temperature: float = 1.0,
        kept_sets: Sequence[KeptSets | None] | None = None,
    ) -> list[Float64Array]:
        """Measure the effect of the last float32 bit of the weights on each log-probability.

        Returns float64 [tokens - 1] per sequence: the largest change over a few draws. Each draw multiplies every
        weight, and every position that enters a rotary table, by 1 + u * 2**-23, u uniform in [-1, 1), and computes the
        table in float64: a backward error that any float32 program makes. Raises ValueError unless the scorer is in
        float64, whose own rounding is far smaller. The weights are restored.
        """
        if self._float64 is None:
            raise ValueError("the resolution of float32 needs a scorer with dtype=torch.float64")
        exact = self.logprobs(sequences, temperature, kept_sets)
        moved = [np.zeros(len(values), np.float64) for values in exact]
        kept = [parameter.detach().clone() for parameter in self._model.parameters()]
        noise = self._float64.noise = torch.Generator().manual_seed(0)
        try:
            for _ in range(_RESOLUTION_DRAWS):
                for parameter, weight in zip(self._model.parameters(), kept, strict=True):
                    parameter.data.copy_(_perturbed(weight, noise))
                scored = self.logprobs(sequences, temperature, kept_sets)
                for largest, values, centre in zip(moved, scored, exact, strict=True):
                    np.maximum(largest, np.abs(values - centre), out=largest)
        finally:
            self._float64.noise = None
            for parameter, weight in zip(self._model.parameters(), kept, strict=True):
                parameter.data.copy_(weight)
        return moved


def _perturbed(values: Tensor, noise: torch.Generator) -> Tensor:
    """Return the values times 1 + u * 2**-23, in float64."""
    last_bits = torch.rand(values.shape, generator=noise, dtype=torch.float64) * 2 - 1
    return values * (1 + _FLOAT32_ULP * last_bits.to(values.device))


class _Float64(TorchFunctionMode):
    """Mode that replaces float32 by float64 in norms, which ignore the dtype of the model, but not in rotary tables.

    While there is ``noise``, rotary tables are computed in float64 from perturbed positions.
    """

    noise: torch.Generator | None = None

    def __init__(self, model: PolicyModel) -> None:
        super().__init__()
        self._in_table = False
        for module in model.modules():
            if hasattr(module, "inv_freq"):
                module.register_forward_pre_hook(self._begin_table, with_kwargs=True)
                module.register_forward_hook(lambda *_: setattr(self, "_in_table", False), always_call=True)

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._in_table:
            return func(*args, **(kwargs or {}))
        if func is Tensor.float:
            func = Tensor.double
        exact = tuple(torch.float64 if value is torch.float32 else value for value in args)
        named = {k: torch.float64 if value is torch.float32 else value for k, value in (kwargs or {}).items()}
        return func(*exact, **named)

    def _begin_table(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Perturb the positions in the arguments of a rotary embedding, ``(x, position_ids)``, if there is noise."""
        self._in_table = self.noise is None
        if self.noise is None:
            return args, kwargs
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": _perturbed(kwargs["position_ids"].double(), self.noise)}
        return (args[0], _perturbed(args[1].double(), self.noise), *args[2:]), kwargs


_DTYPES: Mapping[str, torch.dtype] = {"BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


def load_adapted(folder: Path, base: ModelSource, *, dtype: torch.dtype, device: torch.device) -> PolicyModel:
    """Load the adapter in a PEFT folder above a base. Raises CheckpointError if it does not fit."""
    source = replace(base, adapter=read_adapter_settings(folder), half_base=False)
    try:
        model = source.load(dtype=dtype, device=device)
    except ConfigError as error:
        problem = f"{folder}: the adapter does not fit its base: {error}"
        raise CheckpointError(problem, reason=Reason.FOREIGN_ARCHITECTURE) from error
    tensors = {name: parameter.detach() for name, parameter in model.trained_parameters().items()}
    with safe_open(folder / ADAPTER_WEIGHTS_FILE, framework="pt") as file:
        different = sorted(set(file.keys()) ^ tensors.keys())
    if different:
        raise CheckpointError(
            f"{folder / ADAPTER_WEIGHTS_FILE}: its tensors are not A and B of the adapted layers: "
            f"{different[0]} ({len(different)} in total)",
            reason=Reason.FOREIGN_ARCHITECTURE,
        )
    load_weights(folder, tensors)
    return model


def write_merged_policy(policy: VerifiedPolicy, folder: Path) -> None:
    """Write a published adapter and its base as one folder in the dtype of the base (``write_merged``)."""
    if policy.base is None:
        raise ValueError(f"{policy.folder}: full weights have no adapter to merge")
    dtype = _DTYPES.get(policy.base.manifest.dtype, torch.float32)
    write_merged(policy.folder, ModelSource(folder=policy.base.folder), folder, dtype)


def write_merged(adapter: Path, base: ModelSource, folder: Path, dtype: torch.dtype) -> None:
    """Write the adapter in a PEFT folder and its base as one folder in ``dtype``; their sum is computed in float32."""
    model = load_adapted(adapter, base, dtype=torch.float32, device=torch.device("cpu"))
    merge_adapter(model.causal_lm)
    weights = {name: parameter.detach() for name, parameter in model.base_parameters().items()}
    write_policy_folder(folder, weights, dtype, base.folder, model.config)
