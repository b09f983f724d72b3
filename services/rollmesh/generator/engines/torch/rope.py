"""Rotary position embedding as one complex multiplication.

Hugging Face rotates dimension i with dimension i + D/2. The dot product of a query and a key does not change if both
are permuted in the same way, so the packed projections put each pair side by side. The rotation is then
``(a + ib) * exp(i * position * frequency)``: one operation in place instead of six.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rollmesh.generator.engines.torch.architecture import Rope


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
