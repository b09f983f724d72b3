"""Matrix products, RMS norm and rotary embedding of the forward pass.

The BLAS in torch's wheels runs AVX2 kernels on AMD processors. The OpenBLAS in numpy's wheels has AVX-512 kernels and a
cheaper call, and computes small batched products two to four times faster. The result depends on the processor, the
builds and the environment (OPENBLAS_CORETYPE), so both are timed at startup. Operands are prepared once and reused.

Hugging Face rotates dimension i with dimension i + D/2. The dot product of a query and a key does not change if both
are permuted in the same way, so the packed projections put each pair side by side. The rotation is then
``(a + ib) * exp(i * position * frequency)``: one operation in place instead of six.
"""

import math
import os
import time
import timeit
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollmesh.generator.engines.torch.architecture import Rope

Int64Array = npt.NDArray[np.int64]
Operand = Any
"""A tensor or a numpy view of it; used only by the Multiply that made it."""

_TRIALS, _TRIAL_SECONDS = 50, 0.5
_TRIAL_ROWS = 64
"""Those of the default pool; where torch is faster with them, it is a few percent slower with a few rows."""


class TorchMultiply:
    """Products out = a @ b of two matrices or two batches of matrices, for any device and dtype."""

    def operand(self, tensor: Tensor) -> Operand:
        return tensor

    def __call__(self, a: Operand, b: Operand, out: Operand) -> object:
        return torch.mm(a, b, out=out) if a.ndim == 2 else torch.bmm(a, b, out=out)


class NumpyMultiply:
    """The same products by numpy, for float32 on the CPU."""

    def operand(self, tensor: Tensor) -> Operand:
        return tensor.numpy()

    def __call__(self, a: Operand, b: Operand, out: Operand) -> object:
        return np.matmul(a, b, out=out)


Multiply = TorchMultiply | NumpyMultiply


def fastest_multiply(weight: Tensor, head_size: int) -> Multiply:
    """Return the faster implementation for products with ``weight`` [in, out] and attention of small batches."""
    # numpy's BLAS uses all cores unless it is set to torch's number of threads.
    blas_threads = os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS")
    threads_agree = blas_threads == str(torch.get_num_threads())
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not threads_agree:
        return TorchMultiply()
    with torch.inference_mode():
        candidates: tuple[Multiply, ...] = (TorchMultiply(), NumpyMultiply())
        trials = [_trial(candidate, weight, head_size) for candidate in candidates]
        # In turn: other programs, which slow down one as long as the other, must not choose.
        rounds, until = list[list[float]](), time.monotonic() + _TRIAL_SECONDS
        while len(rounds) < _TRIALS and (len(rounds) < 3 or time.monotonic() < until):
            rounds.append([timeit.timeit(trial, number=1) for trial in trials])
        seconds = [min(each) for each in zip(*rounds, strict=True)]
        return candidates[seconds.index(min(seconds))]


def _trial(multiply: Multiply, weight: Tensor, head_size: int) -> Callable[[], object]:
    rows, wide = weight.new_ones(_TRIAL_ROWS, weight.shape[0]), weight.new_empty(_TRIAL_ROWS, weight.shape[1])
    queries, keys = weight.new_ones(_TRIAL_ROWS, 4, head_size), weight.new_ones(_TRIAL_ROWS, head_size, 64)
    scores = weight.new_empty(_TRIAL_ROWS, 4, 64)
    products = [tuple(multiply.operand(t) for t in three) for three in ((rows, weight, wide), (queries, keys, scores))]
    return lambda: [multiply(*product) for product in products]


def unit_norm(x: Tensor, floor: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute x / sqrt(sum(x^2) + floor^2) over the last dimension in float32; ``floor`` = sqrt(size * eps).

    The RMS norm is this value times sqrt(size) times the norm's weight; the packed weights contain both factors. This
    form needs three kernels, the textbook form needs six. hypot keeps eps exact.
    """
    if x.dtype != torch.float32:
        result = unit_norm(x.float(), floor)
        return result.to(x.dtype) if out is None else out.copy_(result)
    return torch.div(x, torch.hypot(torch.linalg.vector_norm(x, 2, -1, True), floor), out=out)


def inverse_frequencies(rope: Rope, head_size: int) -> Tensor:
    """Compute the angular frequency of each pair, float32 [head_size / 2].

    The float32 operations and their order are those of transformers, so that every bit is equal to the trainer's: an
    error in the last bit of a frequency grows with the position to 5e-4 nats within 6,500 tokens. ``llama3`` is the
    scaling of the Llama 3.1 release: wavelengths beyond the original context are stretched by ``factor``, short ones
    are kept, those between are interpolated.
    """
    exponent = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    frequency = 1.0 / (rope.theta**exponent)
    if rope.kind == "default":
        return frequency
    context, low, high = rope.original_context, rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / frequency
    scaled = torch.where(wavelength > context / low, frequency / rope.factor, frequency)
    smooth = (context / wavelength - low) / (high - low)
    between = (1 - smooth) * scaled / rope.factor + smooth * scaled
    return torch.where((wavelength >= context / high) & (wavelength <= context / low), between, scaled)


def rotation_table(rope: Rope, head_size: int, positions: int, device: torch.device) -> Tensor:
    """Compute exp(i * position * frequency), complex64 [positions, 1, head_size / 2].

    The angle is a float32 product as in Hugging Face's modules, so that long contexts are equal to the trainer's.
    """
    angle = torch.arange(positions, dtype=torch.float32)[:, None] * inverse_frequencies(rope, head_size)[None, :]
    return torch.complex(angle.cos(), angle.sin()).unsqueeze(1).to(device)


def pair_order(head_size: int) -> Tensor:
    """Return the order of a head's dimensions that puts rotation pairs side by side, int64 [head_size]."""
    return torch.arange(head_size).view(2, head_size // 2).t().reshape(-1)


def as_pairs(heads: Tensor) -> Tensor:
    """View float32 ``heads`` [..., head_size] as complex numbers [..., head_size / 2]."""
    return torch.view_as_complex(heads.view(*heads.shape[:-1], -1, 2))


def rotate_(heads: Tensor, rotations: Tensor) -> None:
    """Rotate ``heads`` [..., head_size] in place; ``rotations`` complex64, broadcastable to [..., head_size / 2]."""
    if heads.dtype == torch.float32:
        as_pairs(heads).mul_(rotations)
    else:
        turned = as_pairs(heads.float()).mul_(rotations)
        heads.copy_(torch.view_as_real(turned).flatten(-2))
