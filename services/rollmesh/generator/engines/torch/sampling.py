"""Sampling of a step's tokens by inverse CDF, with one uniform number per token keyed by (seed, trajectory, position).

The noise of a token depends only on this key, so an interrupted rollout continues token for token on another
generator. One uniform and a running sum per row cost far less than a Gumbel value per vocabulary entry (vocabularies
of 150k). Both methods are equally robust: a token changes only if two candidates are within rounding error.
"""

import hashlib
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollmesh.generator.engines.torch.kernels import Int64Array
from rollmesh.types import KeptSets

UInt64Array = npt.NDArray[np.uint64]
BoolArray = npt.NDArray[np.bool_]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S16 = (np.uint64(n) for n in (30, 27, 31, 16))
_BITS = 48
_NOISE_STEPS = 8
"""Steps whose noise is computed at once."""
_NOISE_AHEAD = 64
"""Tokens of a row whose noise is computed at once."""


def noise_key(seed: int, trajectory_id: str) -> int:
    """Return the 64-bit key of one trajectory's noise."""
    digest = hashlib.blake2b(f"{seed}\x00{trajectory_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def uniforms(keys: UInt64Array, positions: Int64Array) -> npt.NDArray[np.float64]:
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


PARAMETERS = np.dtype([("temperature", "f8"), ("top_p", "f8"), ("top_k", "i8"), ("min_p", "f8"), ("kept_tokens", "i8")])
"""Sampling parameters of a row, by their names in SamplingParams."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restriction:
    """Truncation of the rows that sample from a part of the vocabulary."""

    rows: Tensor  # int64 [restricted]
    top_p: Tensor  # float64 [restricted, 1]
    most: Tensor  # int64 [restricted, 1], most likely tokens that may be kept: top-k, else the largest set
    of_top_k: Tensor  # bool [restricted, 1], rows whose top-p is of what top-k keeps, not of the vocabulary
    min_p: Tensor  # float64 [restricted, 1]
    candidates: int
    """Largest ``most`` of the rows."""
    keeping: Tensor | None  # int64 [keeping], rows whose sets are returned; None if there are none


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSampling:
    """Sampling parameters of the rows of one step; None if no row needs them, the fast path of training."""

    inverse_temperature: Tensor | None = None  # float32 [rows, 1]; 1 in greedy rows
    greedy: Tensor | None = None  # bool [rows, 1]
    restriction: Restriction | None = None
    keeping: Int64Array = field(default_factory=lambda: np.zeros(0, np.int64))  # [keeping], rows with kept sets

    @property
    def plain(self) -> bool:
        """Whether every row samples from the whole distribution at temperature 1."""
        return self.inverse_temperature is None and self.restriction is None

    @classmethod
    def of_rows(cls, parameters: npt.NDArray[np.void], vocab_size: int, device: torch.device) -> Self:
        """Build the parameters of rows with these ``PARAMETERS``, [rows]."""

        def column(values: npt.NDArray[np.generic]) -> Tensor:
            return torch.from_numpy(values).unsqueeze(1).to(device)

        temperature, top_p, top_k, min_p, kept = (parameters[name] for name in PARAMETERS.names or ())
        greedy = temperature == 0
        inverse = None
        if (temperature != 1.0).any():
            inverse = column((1.0 / np.where(greedy, 1.0, temperature)).astype(np.float32))
        truncated = (top_p < 1.0) | (top_k > 0) | (min_p > 0.0)
        restricted, keeping = np.flatnonzero(truncated), np.flatnonzero(truncated & (kept > 0))
        restriction = None
        if len(restricted):
            most = np.where(top_k > 0, top_k, np.where(kept > 0, kept, vocab_size))[restricted]
            restriction = Restriction(
                candidates=min(int(most.max()), vocab_size),
                rows=torch.from_numpy(restricted).to(device),
                top_p=column(top_p[restricted]),
                most=column(most),
                of_top_k=column(top_k[restricted] > 0),
                min_p=column(min_p[restricted]),
                keeping=torch.from_numpy(keeping).to(device) if len(keeping) else None,
            )
        return cls(
            inverse_temperature=inverse,
            greedy=column(greedy) if greedy.any() else None,
            restriction=restriction,
            keeping=keeping,
        )


@dataclass(slots=True, kw_only=True)
class RowOrder:
    """The running slots in cache order, with the arrays that each step reads."""

    slots: Int64Array  # [rows]
    stops: Int64Array  # [rows, most stop ids], -1 where unused
    stop_ids: frozenset[int]
    """Stop ids of any row."""
    sampling: StepSampling
    steps_left: int
    """Steps until the next chunk is due or a budget ends."""
    keys: UInt64Array  # [rows]
    positions: Int64Array  # [rows], positions of the next tokens without ``noise`` or ``ahead``
    noise: list[Tensor] = field(default_factory=list)
    """Uniform numbers of the next steps of a token a row, the last step first, float64 [rows, 1] each."""
    ahead: npt.NDArray[np.float64] | None = None
    """Uniform numbers of each row's next tokens, [rows * tokens], where rows advance by different counts."""
    next_places: Int64Array = field(default_factory=lambda: np.zeros((0, 1), np.int64))
    """Place in ``ahead`` of each row's next number, [rows, 1]."""
    most_used: int = 0
    """Most numbers of ``ahead`` that a row has used."""
    device: torch.device

    def next_noise(self) -> Tensor:
        """Return the uniform numbers of the next step of one token a row, float64 [rows, 1]."""
        if self.ahead is not None and self.most_used < _NOISE_AHEAD:  # between wide steps
            found = self.noise_of(1)
            self.advance(np.ones_like(self.slots), 1)
            return found
        if not self.noise:
            self.settle()
            ahead = np.arange(_NOISE_STEPS)[::-1, None]
            numbers = torch.from_numpy(uniforms(self.keys, self.positions + ahead)).unsqueeze(2)
            self.noise = list(numbers.to(self.device).unbind())
            self.positions = self.positions + _NOISE_STEPS
        return self.noise.pop()

    def noise_of(self, width: int) -> Tensor:
        """Return the uniform numbers of the next ``width`` tokens of each row, float64 [rows * width, 1].

        The rows advance by ``advance``.
        """
        if self.ahead is None or self.most_used + width > _NOISE_AHEAD:
            self.settle()
            numbers = uniforms(self.keys[:, None], self.positions[:, None] + np.arange(_NOISE_AHEAD))
            self.ahead, self.next_places, self.most_used = numbers.ravel(), _starts(len(self.slots)), 0
        return torch.from_numpy(self.ahead.take(self.next_places + np.arange(width))).view(-1, 1).to(self.device)

    def advance(self, counts: Int64Array, most: int) -> None:
        """Move on by the ``counts`` tokens of each row that are kept, ``most`` the largest of them."""
        self.next_places += counts[:, None]
        self.most_used += most

    def settle(self) -> None:
        """Make ``positions`` those of the next tokens: plain steps are coming, or noise is used up."""
        used = -len(self.noise) if self.ahead is None else (self.next_places - _starts(len(self.slots)))[:, 0]
        self.positions = self.positions + used
        self.noise, self.ahead = [], None

    def stopped(self, tokens: Int64Array) -> BoolArray:
        """Return a mask of the rows that drew one of their stop ids, [rows]."""
        found: BoolArray = (self.stops == tokens[:, None]).any(axis=1)
        return found


def _starts(rows: int) -> Int64Array:
    """Return the place of the first number of each row in ``RowOrder.ahead``, [rows, 1]."""
    return np.arange(0, rows * _NOISE_AHEAD, _NOISE_AHEAD)[:, None]


class Drawn(NamedTuple):
    """Tokens that a step has drawn."""

    tokens: Tensor  # int64 [rows]
    logprobs: Tensor  # float32 [rows]
    kept_sets: KeptSets | None  # of the keeping rows


def sample(logits: Tensor, noise: Tensor, sampling: StepSampling) -> Drawn:
    """Draw one token per row.

    ``logits`` [rows, vocab], ``noise`` float64 [rows, 1]. Log-probabilities are those of log_softmax(z/T) over the kept
    set in keeping rows, and over the full vocabulary in others, whatever they are drawn from; log_softmax(z) at T=0.
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
    sets = None
    if sampling.restriction is not None and (keeping := sampling.restriction.keeping) is not None:
        weights = kept[keeping]
        counts = (weights > 0).sum(1)
        logprobs[keeping] = (weights.gather(1, tokens[keeping]) / cumulative[keeping, -1:]).log().float()
        ids = weights.nonzero()[:, 1]
        sets = KeptSets(counts=counts.int().cpu().numpy(), ids=ids.int().cpu().numpy())
    return Drawn(tokens.squeeze(1), logprobs.squeeze(1), sets)


def _restrict(probabilities: Tensor, restriction: Restriction) -> Tensor:
    """Zero the tokens dropped by top-k, by top-p of what it keeps, and by min-p; keep the most likely token.

    Without top-k, top-p is of the vocabulary, and the largest set bounds what it keeps.
    """
    rows = probabilities[restriction.rows]
    ordered, order = _most_likely(rows, restriction.candidates)
    rank = torch.arange(ordered.shape[-1], device=rows.device)
    within = ordered * (rank < restriction.most)
    mass = within.cumsum(-1, dtype=torch.float64)
    whole = torch.where(restriction.of_top_k, mass[:, -1:], rows.sum(-1, keepdim=True, dtype=torch.float64))
    # A token is kept while the mass before it is below top_p of the whole.
    keep = (mass - within) < restriction.top_p * whole
    keep &= within >= restriction.min_p * within[:, :1]
    kept = torch.zeros_like(rows).scatter_(1, order, within * keep)
    result = probabilities.clone()
    result[restriction.rows] = kept
    return result


def _most_likely(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` largest values of each row, equal ones by id, and their ids, [rows, count] each.

    Sorting all of a large vocabulary takes several times as long, but topk alone orders equal values at random.
    """
    if count < rows.shape[-1]:
        values, ids = rows.topk(count)
        with_ties = int((rows >= values[:, -1:]).sum(-1).max())
        if with_ties > count:
            ids = rows.topk(with_ties).indices
        ids = ids.sort(-1).values
        values, order = rows.gather(1, ids).sort(dim=-1, descending=True, stable=True)
        return values[:, :count], ids.gather(1, order)[:, :count]
    values, ids = rows.sort(dim=-1, descending=True, stable=True)
    return values, ids
