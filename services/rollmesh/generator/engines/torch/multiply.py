"""Matrix products by torch, or by numpy's BLAS over the same memory if that is faster.

The BLAS in torch's wheels runs AVX2 kernels on AMD processors. The OpenBLAS in numpy's wheels has AVX-512 kernels and a
cheaper call, and computes small batched products two to four times faster. The result depends on the processor, the
builds and the environment (OPENBLAS_CORETYPE), so both are timed at startup. Operands are prepared once and reused.
"""

from __future__ import annotations

import os
import timeit
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

Operand = Any
"""A tensor or a numpy view of it; used only by the Multiply that made it."""

_TRIALS = 7
_TRIAL_ROWS = 16


class Multiply(Protocol):
    """Product out = a @ b of two matrices or two batches of matrices."""

    def operand(self, tensor: Tensor) -> Operand:
        """Prepare a tensor as an operand, which shares its memory."""

    def __call__(self, a: Operand, b: Operand, out: Operand) -> object:
        """Write the product into ``out``."""


class TorchMultiply:
    """Products by torch, for any device and dtype."""

    def operand(self, tensor: Tensor) -> Tensor:
        return tensor

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> object:
        return torch.mm(a, b, out=out) if a.ndim == 2 else torch.bmm(a, b, out=out)


class NumpyMultiply:
    """Products by numpy, for float32 on the CPU."""

    def operand(self, tensor: Tensor) -> Any:
        return tensor.numpy()

    def __call__(self, a: Any, b: Any, out: Any) -> object:
        return np.matmul(a, b, out=out)


def fastest_multiply(weight: Tensor, head_size: int) -> Multiply:
    """Return the faster implementation for products with ``weight`` [in, out] and attention of small batches."""
    plain = TorchMultiply()
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not _threads_agree():
        return plain
    with torch.inference_mode():
        candidates: tuple[Multiply, ...] = (plain, NumpyMultiply())
        return min(candidates, key=lambda candidate: _seconds(candidate, weight, head_size))


def _threads_agree() -> bool:
    """Tell whether numpy's BLAS is set to torch's number of threads; it uses all cores otherwise."""
    blas_threads = os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS")
    return blas_threads == str(torch.get_num_threads())


def _seconds(multiply: Multiply, weight: Tensor, head_size: int) -> float:
    rows, wide = weight.new_ones(_TRIAL_ROWS, weight.shape[0]), weight.new_empty(_TRIAL_ROWS, weight.shape[1])
    queries, keys = weight.new_ones(_TRIAL_ROWS, 4, head_size), weight.new_ones(_TRIAL_ROWS, head_size, 64)
    scores = weight.new_empty(_TRIAL_ROWS, 4, 64)
    products = [tuple(multiply.operand(t) for t in three) for three in ((rows, weight, wide), (queries, keys, scores))]
    return min(timeit.repeat(lambda: [multiply(*product) for product in products], number=1, repeat=_TRIALS))
