"""One decode step for whatever rows are in the cache: planned as they are, or padded to static shapes.

A CUDA graph replays fixed shapes at fixed addresses. So the padded step rounds the rows of every tier up to a bucket
(1, 2, 4, 8 ... or all rows that the tier's block has) and attends over the tier's whole width. Rows beyond those in
use are scratch: they belong to no call, decode token 0 from position 0, and what they write is overwritten or masked
when a call takes the row. A row of a held call may serve as scratch too, from the end of its tokens; ``KvCache.trim``
masks what was written there. Every row only reads its own cache, so padding cannot reach a call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rollmesh.generator.engines.torch.decoder_model import DecoderModel
from rollmesh.generator.engines.torch.graphs import GraphPool
from rollmesh.generator.engines.torch.kv_cache import KvCache, Tier
from rollmesh.generator.engines.torch.plan import Planner, StepPlan, TierShare
from rollmesh.generator.engines.torch.slots import Int64Array

Capture = Callable[[Callable[[], object]], Callable[[], object]]
"""Turns a function over static memory into one that does the same."""

_MOST_STEPS = 64
"""Combinations of buckets kept, with their graphs."""


class Stepper(Protocol):
    """Decodes the rows of a cache, in the order of its tiers."""

    def prepare(self, lengths: Int64Array) -> int:
        """Get ready for the active rows; returns for how many steps that holds.

        ``lengths`` [rows] are the cached tokens of all rows in order, those of held rows too.
        """

    def logits(self, tokens: Tensor) -> Tensor:
        """Append ``tokens`` int64 [active]; returns the logits [active, vocab], a buffer valid until the next step."""

    def release(self) -> None:
        """Rows are about to move: drop what ``prepare`` made."""


def make_stepper(model: DecoderModel, cache: KvCache, slots: int, *, graphs: bool) -> Stepper:
    """The padded stepper where ``graphs`` are wanted (captured on a GPU only), else the plain one."""
    if not graphs:
        return PlainStepper(model, cache, slots)
    on_gpu = model.device.type == "cuda"
    return BucketedStepper(model, cache, slots, GraphPool(model.device).capture if on_gpu else _as_it_is)


class PlainStepper:
    """Steps over exactly the rows in use and little more than the tokens they have."""

    def __init__(self, model: DecoderModel, cache: KvCache, slots: int) -> None:
        self._model = model
        self._cache = cache
        self._planner = Planner(model.arch, slots, model.multiply, model.weights.embedding.dtype, model.device)
        self._plan: StepPlan | None = None

    def prepare(self, lengths: Int64Array) -> int:
        """Plan these rows."""
        self._plan = self._planner.plan(self._cache, lengths)
        return self._plan.step_count

    def logits(self, tokens: Tensor) -> Tensor:
        """Decode one token a row."""
        assert self._plan is not None
        return self._model.decode(tokens, self._plan)

    def release(self) -> None:
        """Let go of the views of the cache."""
        self._plan = None


class BucketedStepper:
    """Padded steps of static shape, each made once per combination of buckets and reused."""

    def __init__(self, model: DecoderModel, cache: KvCache, slots: int, capture: Capture) -> None:
        self._model = model
        self._cache = cache
        self._capture = capture
        self._planner = Planner(
            model.arch,
            2 * slots,  # a power of two is less than twice what it rounds up
            model.multiply,
            model.weights.embedding.dtype,
            model.device,
            shared_score_tokens=cache.token_capacity,
        )
        self._steps: OrderedDict[tuple[tuple[int, int], ...], _StaticStep] = OrderedDict()
        self._current: _StaticStep | None = None
        self._live: Tensor | None = None
        """Rows of the padded step that belong to calls, int64 [rows]; None when all do."""
        cache.before_move = self._forget

    @property
    def step_count(self) -> int:
        """Combinations of buckets that are ready."""
        return len(self._steps)

    def prepare(self, lengths: Int64Array) -> int:
        """Find or make the step whose buckets hold these rows, and place them in it."""
        shares: list[tuple[int, TierShare]] = []
        padded_lengths, live = [], []
        steps, start, active, padded_start = self._cache.longest, 0, 0, 0
        for number, tier in enumerate(self._cache.tiers):
            first, start, used = start, start + len(tier.slots), tier.active_count
            if not used:
                continue
            rows = bucket(used, tier.row_capacity)
            # Held rows that serve as padding are written after their own tokens only.
            here = lengths[first:start][:rows]
            steps = min(steps, tier.width - int(here.max()))
            padded_lengths.append(np.pad(here, (0, rows - len(here))))
            live.append(np.arange(padded_start, padded_start + used))
            shares.append((number, TierShare(tier=tier, rows=rows, span=tier.width)))
            active, padded_start = active + used, padded_start + rows
        self._current = self._step_of(shares)
        self._current.place(self._planner.counters(np.concatenate(padded_lengths)))
        self._live = None
        if active < padded_start:
            self._live = torch.from_numpy(np.concatenate(live)).to(self._model.device)
        return steps

    def logits(self, tokens: Tensor) -> Tensor:
        """Decode one token a row."""
        step, live = self._current, self._live
        assert step is not None
        if live is None:
            return step.run(tokens)
        step.tokens.index_copy_(0, live, tokens)
        return step.run(None).index_select(0, live)

    def release(self) -> None:
        """Forget which rows are whose; the static steps stay."""
        self._current = None

    def _step_of(self, shares: list[tuple[int, TierShare]]) -> _StaticStep:
        key = tuple((number, share.rows) for number, share in shares)
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = _StaticStep(self._model, self._planner, [s for _, s in shares], self._capture)
            if len(self._steps) > _MOST_STEPS:
                self._steps.popitem(last=False)
        self._steps.move_to_end(key)
        return step

    def _forget(self, tier: Tier) -> None:
        """The block of ``tier`` moves: what was made over its old memory must never run again."""
        number = self._cache.tiers.index(tier)
        for key in [key for key in self._steps if any(number == n for n, _ in key)]:
            del self._steps[key]


class _StaticStep:
    """The decode step of one combination of buckets, over memory that stays where it is."""

    def __init__(self, model: DecoderModel, planner: Planner, shares: list[TierShare], capture: Capture) -> None:
        rows = sum(share.rows for share in shares)
        self._counters = planner.counters(np.zeros(rows, np.int64))
        plan = planner.build(shares, self._counters, 0)
        tokens = torch.zeros(rows, dtype=torch.int64, device=model.device)
        self.tokens = tokens
        """Input of the step, int64 [padded rows]; token 0 in scratch rows."""
        self._logits = plan.logits
        # Without ``self``: a cycle would keep the old memory of a block that moves until the next garbage collection.
        self._work: Callable[[], object] = lambda: model.decode(tokens, plan)
        self._capture: Capture | None = capture
        self._ran = False

    def place(self, counters: Tensor) -> None:
        """Set the next position of every row; which rows are scratch may have changed, so their tokens too."""
        self._counters.copy_(counters)
        self.tokens.zero_()

    def run(self, tokens: Tensor | None) -> Tensor:
        """Decode ``tokens`` [padded rows], or what is in ``self.tokens``; returns logits [padded rows, vocab].

        The first run is a plain one, and serves as the warm-up that a capture needs; the second one captures.
        """
        if tokens is not None:
            self.tokens.copy_(tokens)
        if self._ran and self._capture is not None:
            self._work, self._capture = self._capture(self._work), None
        self._work()
        self._ran = True
        return self._logits


def bucket(rows: int, most: int) -> int:
    """The smallest power of two that holds ``rows``, at most ``most``."""
    return min(1 << (rows - 1).bit_length(), most)


def _as_it_is(work: Callable[[], object]) -> Callable[[], object]:
    return work
