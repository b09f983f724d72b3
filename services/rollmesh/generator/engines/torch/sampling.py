"""Token sampling by inverse CDF with one uniform number per token, keyed by (seed, trajectory, position).

The noise of a token depends only on this key, so an interrupted rollout continues token for token on another
generator. One uniform and a running sum per row cost far less than a Gumbel value per vocabulary entry (vocabularies
of 150k). Both methods are equally robust: a token changes only if two candidates are within rounding error.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

UInt64Array = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S16 = (np.uint64(n) for n in (30, 27, 31, 16))
_BITS = 48


def noise_key(seed: int, trajectory_id: str) -> int:
    """Return the 64-bit key of one trajectory's noise."""
    digest = hashlib.blake2b(f"{seed}\x00{trajectory_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def uniforms(keys: UInt64Array, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return uniform numbers in (0, 1), float64 [rows]: SplitMix64 of key + position, counter-based and stateless.

    They have 48 bits and are centred, so that neither 0 nor 1 occurs even after a multiplication by the total mass.
    """
    x = keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    x ^= x >> _S30
    x *= _MIX_A
    x ^= x >> _S27
    x *= _MIX_B
    x ^= x >> _S31
    return ((x >> _S16).astype(np.float64) + 0.5) * 2.0**-_BITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Restriction:
    """Top-p and top-k of the rows that sample from a part of the vocabulary (evaluation only)."""

    rows: Tensor  # int64 [restricted]
    top_p: Tensor  # float64 [restricted, 1]
    top_k: Tensor  # int64 [restricted, 1]; vocabulary size where it is off


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSampling:
    """Sampling parameters of the rows of one step; None if no row needs them, the fast path of training."""

    inverse_temperature: Tensor | None = None  # float32 [rows, 1]; 1 in greedy rows
    greedy: Tensor | None = None  # bool [rows, 1]
    restriction: Restriction | None = None


def sample(logits: Tensor, noise: Tensor, sampling: StepSampling) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    ``logits`` [rows, vocab], ``noise`` float64 [rows, 1]. Returns token ids int64 [rows] and behavior_logprobs
    float32 [rows]: log_softmax(z/T) over the full vocabulary, regardless of top-p and top-k; log_softmax(z) at T=0.
    """
    z = logits.float()
    if sampling.inverse_temperature is not None:
        z = z * sampling.inverse_temperature
    probabilities = torch.softmax(z, dim=-1)
    kept = probabilities if sampling.restriction is None else _restrict(probabilities, sampling.restriction)
    # float64: the sum over a large vocabulary must resolve tokens less likely than float32's spacing near 1.
    cumulative = kept.cumsum(-1, dtype=torch.float64)
    tokens = torch.searchsorted(cumulative, noise * cumulative[:, -1:], right=True)
    tokens.clamp_(max=z.shape[-1] - 1)  # only NaN logits reach the limit; the caller rejects them by their logprob
    if sampling.greedy is not None:
        tokens = torch.where(sampling.greedy, z.argmax(-1, keepdim=True), tokens)
    logprobs = probabilities.gather(1, tokens).log_()
    return tokens.squeeze(1), logprobs.squeeze(1)


def _restrict(probabilities: Tensor, restriction: Restriction) -> Tensor:
    """Zero the tokens dropped by top-k and then top-p; keep the most likely token."""
    rows = probabilities[restriction.rows]
    ordered, order = rows.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(rows.shape[-1], device=rows.device)
    within_k = ordered * (rank < restriction.top_k)
    mass = within_k.cumsum(-1, dtype=torch.float64)
    # A token is kept while the mass before it is below top_p of the mass kept by top-k.
    keep = (mass - within_k) < restriction.top_p * mass[:, -1:]
    kept = torch.zeros_like(rows).scatter_(1, order, within_k * keep)
    result = probabilities.clone()
    result[restriction.rows] = kept
    return result
