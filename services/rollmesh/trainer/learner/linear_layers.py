"""Linear layers whose float32 products oneDNN computes.

The BLAS in torch's wheels runs AVX2 kernels on processors of AMD. oneDNN has AVX-512 kernels for every processor that
can, but compiles one for each number of rows: most of the rows are computed in a multiple of a block, the rest by the
BLAS. The processor alone decides, and never a measurement: a step that is replayed must give the same weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_BLOCK_ROWS = 512


def use_onednn(model: nn.Module) -> None:
    """Let oneDNN compute the linear layers of a model where the processor has AVX-512."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if torch.backends.cpu.get_cpu_capability() == "AVX512" and has_onednn:
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = _OneDnnLinear


class _OneDnnLinear(nn.Linear):
    """Linear layer; other devices, other dtypes, autocast and few rows are computed as ever."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        plain = input.dtype == weight.dtype == torch.float32 and input.device.type == "cpu"
        if not plain or torch.is_autocast_enabled("cpu") or input.numel() < _BLOCK_ROWS * self.in_features:
            return super().forward(input)
        product: Tensor = _Product.apply(input.flatten(0, -2), weight, self.bias)  # type: ignore[no-untyped-call]
        return product.view(*input.shape[:-1], -1)


class _Product(torch.autograd.Function):
    """``rows @ weight.T + bias`` of rows [rows, in] and weight [out, in]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return _product(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        of_rows, of_weight, of_bias = ctx.needs_input_grad
        return (
            _product(gradient, weight.T) if of_rows else None,
            _product_of_columns(gradient, rows) if of_weight else None,
            gradient.sum(0) if of_bias else None,
        )


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    whole = len(rows) // _BLOCK_ROWS * _BLOCK_ROWS
    blocks = _onednn(rows[:whole], weight, bias)
    if whole == len(rows):
        return blocks
    return torch.cat((blocks, nn.functional.linear(rows[whole:], weight, bias)))


def _product_of_columns(left: Tensor, right: Tensor) -> Tensor:
    """Compute ``left.T @ right``; oneDNN prefers the smaller number of rows of the result."""
    if left.shape[1] > right.shape[1]:
        return _product_of_columns(right, left).T
    whole = len(left) // _BLOCK_ROWS * _BLOCK_ROWS
    blocks = _onednn(left[:whole].T, right[:whole].T)
    return blocks.addmm_(left[whole:].T, right[whole:])


def _onednn(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return product
