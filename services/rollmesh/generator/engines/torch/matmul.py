"""Products with weights: BLAS for few rows, oneDNN over packed weights where it is faster.

The BLAS that torch ships runs its AVX2 kernels on AMD processors; oneDNN uses AVX-512 on any that has it and is then
about twice as fast, but costs some 10 us a call. Small products therefore stay with BLAS.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROW_QUANTUM = 64
"""Pad the rows of large products to a multiple of this: oneDNN compiles a kernel for every new shape."""
_WORTHWHILE = 900_000
"""Multiplications from which on oneDNN wins (measured on Zen 5)."""
_LARGE = 1 << 22
"""Elements from which on the unpacked copy is dropped: the call overhead no longer shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A weight for ``x @ weight``."""

    plain: Tensor | None  # [in, out]
    packed: Tensor | None = None  # oneDNN's own layout; CPU and float32 only

    @classmethod
    def pack(cls, weight: Tensor) -> Matrix:
        """Take a Hugging Face weight [out, in]."""
        if weight.device.type != "cpu" or weight.dtype != torch.float32 or not torch._C._has_mkldnn:
            return cls(plain=weight.t())
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        return cls(plain=weight.t() if weight.numel() < _LARGE else None, packed=packed)

    @property
    def tensor(self) -> Tensor:
        """The one that holds the values."""
        found = self.packed if self.plain is None else self.plain
        assert found is not None
        return found

    def packed_for(self, rows: int) -> Tensor | None:
        """The packed weight if a product with so many rows should use it."""
        if self.plain is None or (self.packed is not None and rows * self.packed.numel() >= _WORTHWHILE):
            return self.packed
        return None


def product(x: Tensor, weight: Matrix, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x @ weight + bias, x [rows, in]; into ``out`` if given."""
    packed = weight.packed_for(x.shape[0])
    if packed is not None:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return result if out is None else out.copy_(result)
    plain = weight.tensor
    return torch.mm(x, plain, out=out) if bias is None else torch.addmm(bias, x, plain, out=out)


def add_product(x: Tensor, y: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """x + y @ weight + bias, y [rows, in]; may reuse the memory of ``x``."""
    packed = weight.packed_for(y.shape[0])
    if packed is not None:
        result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(y, x, packed, bias, "add")
        return result
    x.addmm_(y, weight.tensor)
    return x if bias is None else x.add_(bias)
