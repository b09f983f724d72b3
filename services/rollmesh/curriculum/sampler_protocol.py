"""Protocol of prompt samplers: the row of the prompt that a group gets."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rollmesh.prompt_history import PromptRecord

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One draw of a prompt: the position of its group, and the only source of chance of a sampler."""

    epoch: int
    index: int
    seed: int
    """Seed of the run."""

    def uniform(self, name: str) -> float:
        """Return a number in [0, 1), a function of the draw and of ``name``."""
        text = f"{self.seed}:{self.epoch}:{self.index}:{name}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") / 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTable:
    """Rows of the training prompts; a row is a number in [0, row_count)."""

    row_count: int
    names: Sequence[str] = field(repr=False)  # [rows]
    """Name of the record in the prompt history."""
    domains: tuple[str, ...]
    """Names of the domains, sorted; one empty name without domains."""
    domain_of: Int64Array = field(repr=False)  # [rows]
    """Position in ``domains``."""
    weights: Mapping[str, float]
    """Weight of every domain of a mixture; empty for other sources."""
    endless: BoolArray = field(repr=False)  # [rows]
    """True for a row that gives a new prompt at every draw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Results of the groups of each row so far, filtered ones included; read-only for samplers."""

    groups: Int64Array  # [rows]
    """Groups that have ended or were evicted."""
    members: Int64Array  # [rows]
    """Scored trajectories of these groups."""
    solved: Int64Array  # [rows]
    """Trajectories with a positive outcome of the verifier, or without one a positive reward."""
    reward_sums: Float64Array  # [rows]
    """Sums of the shaped rewards."""
    token_sums: Int64Array  # [rows]
    """Tokens after the prompt."""
    in_progress: Int64Array  # [rows]
    """Groups that are admitted and have not ended."""
    domains: Mapping[str, PromptRecord]
    """Sums over all groups of a domain that have ended; domains without one are left out."""


class PromptSampler(Protocol):
    """Choice of a prompt; a pure function of its arguments, so that any leader chooses the same."""

    def choose(self, draw: Draw, prompts: PromptTable, history: History, train_step: int) -> int:
        """Return the row of the prompt; ``train_step`` is the newest trained step."""
        ...
