"""Low-rank adapter (LoRA) in the layers of a causal LM, by peft.

An adapted layer is computed as ``W x + alpha / rank * B A x``. A has seeded noise and B is zero, so that a new adapter
changes no output. Only A and B are trained; the base is frozen.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from rollmesh.config.model import AdapterConfig
from rollmesh.errors import ConfigError

_ADAPTER = "default"
_A, _B = f".lora_A.{_ADAPTER}.weight", f".lora_B.{_ADAPTER}.weight"
_PEFT_PREFIX = "base_model.model."
_SEED = 20_250_916


def add_adapter(causal_lm: nn.Module, adapter: AdapterConfig) -> dict[str, Any]:
    """Freeze a model and add a zero adapter, the same on every rank; return its ``adapter_config.json``."""
    # peft imports accelerate, which takes seconds: only runs with an adapter pay for it.
    from peft import LoraConfig, inject_adapter_in_model

    names = target_names(causal_lm, adapter)
    config = LoraConfig(r=adapter.rank, lora_alpha=adapter.alpha, lora_dropout=adapter.dropout, target_modules=names)
    defaults: dict[str, Any] = config.to_dict()  # type: ignore[no-untyped-call]
    contents = defaults | {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "target_modules": names,
        "inference_mode": True,
    }
    causal_lm.requires_grad_(False)
    inject_adapter_in_model(config, causal_lm, adapter_name=_ADAPTER)
    if adapter.dropout:
        for layer in _layers(causal_lm):
            layer.lora_dropout[_ADAPTER] = _GradientDropout(adapter.dropout)
    dtype = next(iter(base_parameters(causal_lm).values())).dtype
    for parameter in adapter_parameters(causal_lm).values():
        parameter.data = parameter.data.to(torch.float64 if dtype == torch.float64 else torch.float32)
    reset_adapter(causal_lm)
    return contents


def target_names(causal_lm: nn.Module, adapter: AdapterConfig) -> list[str]:
    """Return the names of the adapted layers, sorted. Raises ConfigError for a name or a rank that no layer fits."""
    sizes: dict[str, int] = {}
    for name, layer in _block_layers(causal_lm):
        last = name.rpartition(".")[2]
        sizes[last] = min(layer.in_features, layer.out_features, sizes.get(last, layer.in_features))
    known = ", ".join(sorted(sizes)) or "none"
    wanted = sorted(sizes) if adapter.target == "all_linear" else sorted(adapter.target)
    missing = [name for name in wanted if name not in sizes]
    if missing or not wanted:
        raise ConfigError(
            f"model.adapter.target={missing or adapter.target}: no linear layer of the transformer blocks of "
            f"{type(causal_lm).__name__} has this name; they are: {known}"
        )
    small = min(wanted, key=lambda name: sizes[name])
    if adapter.rank > sizes[small]:
        raise ConfigError(
            f"model.adapter.rank={adapter.rank}: above the size of {small} ({sizes[small]}); choose at most "
            f"{sizes[small]}, or leave {small} out of model.adapter.target"
        )
    return wanted


def adapter_parameters(causal_lm: nn.Module) -> dict[str, nn.Parameter]:
    """Return A and B of every adapted layer by their names in a PEFT folder."""
    return {
        f"{_PEFT_PREFIX}{name.replace(f'.{_ADAPTER}.', '.')}": parameter
        for name, parameter in causal_lm.named_parameters()
        if name.endswith((_A, _B))
    }


def base_parameters(causal_lm: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of the base by their Hugging Face names; tied parameters occur once."""
    return {
        name.replace(".base_layer.", "."): parameter
        for name, parameter in causal_lm.named_parameters()
        if not name.endswith((_A, _B))
    }


@torch.no_grad()
def reset_adapter(causal_lm: nn.Module) -> None:
    """Set the adapter to its start: seeded A, zero B. Shards are filled without communication."""
    generator = torch.Generator().manual_seed(_SEED)
    for name, parameter in adapter_parameters(causal_lm).items():
        value = torch.zeros(parameter.shape)
        if name.endswith(".lora_A.weight"):
            nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
        if isinstance(parameter, DTensor):
            value = value.to(parameter.device)
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(value)


def halve_base(causal_lm: nn.Module) -> None:
    """Keep the frozen linear layers of the transformer blocks in bfloat16, for passes under bfloat16 autocast.

    Autocast rounds them to it for every pass, so the results are the same. The published base must be in bfloat16, so
    that no weight is rounded; other passes compute in the dtype of their inputs.
    """
    for _, layer in _block_layers(causal_lm):
        if not layer.weight.requires_grad:
            layer.weight.data = layer.weight.data.to(torch.bfloat16)
            layer.__class__ = _HalfLinear


@contextmanager
def adapter_off(causal_lm: nn.Module) -> Iterator[None]:
    """Compute with the base alone within the block. For passes without a gradient."""
    layers = list(_layers(causal_lm))
    try:
        for layer in layers:
            layer.enable_adapters(False)
        # peft also freezes the adapter; FSDP2 would remember that, if its first pass were within the block.
        _train(causal_lm)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        _train(causal_lm)


@torch.no_grad()
def merge_adapter(causal_lm: nn.Module) -> None:
    """Add the adapter to the base weights; it cannot be taken out again."""
    for layer in _layers(causal_lm):
        layer.merge(safe_merge=True)


def _block_layers(causal_lm: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers of the transformer blocks, with those of an adapter."""
    blocks = set(getattr(causal_lm, "_no_split_modules", None) or ())
    for block in (module for module in causal_lm.modules() if type(module).__name__ in blocks):
        yield from ((name, layer) for name, layer in block.named_modules() if isinstance(layer, nn.Linear))


def _train(causal_lm: nn.Module) -> None:
    for parameter in adapter_parameters(causal_lm).values():
        parameter.requires_grad_(True)


def _layers(causal_lm: nn.Module) -> Iterator[Any]:
    from peft.tuners.lora import LoraLayer

    return (module for module in causal_lm.modules() if isinstance(module, LoraLayer))


class _HalfLinear(nn.Linear):
    """Linear layer in bfloat16 that computes in the dtype of its inputs, or as autocast does."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_autocast_enabled(input.device.type):
            return super().forward(input)
        return F.linear(input, self.weight.to(input.dtype), self.bias)


class _GradientDropout(nn.Module):
    """Dropout in passes with a gradient only: scores, canaries and references are computed without it."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self._share = share

    def forward(self, inputs: Tensor) -> Tensor:
        return F.dropout(inputs, self._share) if torch.is_grad_enabled() else inputs
