"""One decode step for the rows in the cache: planned for the exact rows, or padded to static shapes.

Slicing a tensor takes about as long as multiplying two small ones, so a plan contains every view that a step reads or
writes, and is reused until the rows change. One in-place addition advances all positions.

A CUDA graph replays fixed shapes at fixed addresses. So the padded step rounds the rows of every tier up to a bucket
(1, 2, 4, 8 ... or all rows of the tier's block) and attends over the tier's whole width. Rows beyond those in use are
scratch: they belong to no call and decode token 0 from position 0. Their writes are overwritten or unseen when a call
takes the row. The row of a held call may be scratch too, after the end of its tokens. Every row reads only its own
cache, so padding cannot affect a call.
"""

from collections import OrderedDict
from collections.abc import Callable
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from rollmesh.generator.engines.torch.adapters import BASE
from rollmesh.generator.engines.torch.decode_plan import (
    DecodePlan,
    StepBuffers,
    TierPlan,
    TierShare,
)
from rollmesh.generator.engines.torch.decoder_model import DecoderModel
from rollmesh.generator.engines.torch.kernels import Int64Array
from rollmesh.generator.engines.torch.kv_cache import KvCache, PlanKey
from rollmesh.generator.engines.torch.speculation import WIDTHS

Capture = Callable[[Callable[[], object]], Callable[[], object]]
"""Function that captures work over static memory and returns a function that replays it."""

_SPAN = 16
"""Attention spans are rounded up to a multiple of this, so that a plan is valid for several steps."""
_WIDE_SPAN = 64
"""The same for wide steps, whose plans are made for each of several widths."""
_MAX_STEPS, _MAX_PLANS = 64, 512
"""Maximum number of padded steps kept, with their graphs; and of other plans."""


class Stepper:
    """Decoder of the rows in use, in the order of the cache's tiers.

    ``padded`` steps have static shapes and are made once per combination of buckets.
    """

    def __init__(
        self,
        model: DecoderModel,
        cache: KvCache,
        slots: int,
        *,
        most_tokens: int = 0,
        padded: bool = False,
        capture: Capture | None = None,
    ) -> None:
        """Create a decoder of at most ``slots`` rows, and wide steps of at most ``most_tokens`` tokens.

        Without ``capture``, padded steps are captured on a GPU only.
        """
        self._model = model
        self._cache = cache
        self._padded = padded
        self._capture = capture
        if padded and capture is None and model.device.type == "cuda":
            self._capture = _graph_capture(model.device)
        # Rounding up to a power of two less than doubles the rows.
        tokens = (2 if padded else 1) * max(slots, most_tokens)
        scores = min(tokens * cache.longest, (WIDTHS[-1] if most_tokens else 1) * cache.token_capacity)
        self._buffers = model.step_buffers(tokens, cache.longest, scores)
        self._kept: OrderedDict[PlanKey, DecodePlan | TierPlan | _StaticStep] = cache.views
        """Padded steps; or plans of single tiers, as most combinations of tiers come once, and of combinations."""
        self.plan_count = 0
        """Plans of single tiers, padded steps, and captures of these that have been made."""
        self._current: DecodePlan | _StaticStep | None = None
        self._live: Tensor | None = None
        """Tokens of a padded step that are in use, int64; None if all are."""

    def prepare(self, lengths: Int64Array, places: Int64Array | None = None, width: int = 1) -> int:
        """Prepare steps of the active rows; returns the number of steps for which this is valid.

        ``lengths`` [rows] are the cached tokens of all rows in order, including held rows, and ``places`` [rows] the
        places of their adapters; None without adapters. A wide step has ``width`` tokens of each active row; all rows
        have room for them.
        """
        shares: list[TierShare] = []
        rows: list[int] = []  # of the step: numbers of rows in ``lengths``, -1 for padding
        live: list[int] = []
        key: list[tuple[int, int, int]] = [(-1, width, 0)]
        known, steps, start = lengths.tolist(), self._cache.longest, 0
        unit = _SPAN if width == 1 else _WIDE_SPAN
        for number, tier in enumerate(self._cache.tiers):
            first, start, active = start, start + len(tier.slots), tier.active_count
            if not active:
                continue
            count = bucket(active, tier.row_capacity) if self._padded else active
            stop = min(start, first + count)  # held rows used as padding are written only after their tokens
            longest = max(known[first:stop]) + width - 1
            span = tier.width if self._padded else min(tier.width, (longest // unit + 1) * unit)
            steps = min(steps, span - longest)
            live += range(len(rows), len(rows) + active)
            rows += [*range(first, stop), *[-1] * (first + count - stop)]
            shares.append(TierShare(tier, count, span))
            key.append((number, count, span))
        exact = not self._padded and len(rows) == len(lengths)
        positions = lengths if exact else np.append(lengths, 0)[rows]
        if width > 1:
            positions = (positions[:, None] + np.arange(width)).ravel()
        self._buffers.place(positions)
        make = self._static if self._padded else self._joined
        self._current = make(tuple(key), shares, width)
        if self._model.adapters is not None and places is not None:
            self._model.adapters.arrange(np.repeat(np.append(places, BASE)[rows], width))
        self._live = None
        if len(live) < len(rows):
            in_use = (np.array(live)[:, None] * width + np.arange(width)).ravel()
            self._live = torch.from_numpy(in_use).to(self._model.device)
        return steps

    def logits(self, tokens: Tensor) -> Tensor:
        """Append tokens of the active rows, int64 [tokens]; returns the logits of each, valid until the next step."""
        step, live = self._current, self._live
        assert step is not None
        if isinstance(step, DecodePlan):
            return self._model.decode(tokens, step)
        self.plan_count += step.captures_next
        if live is None:
            return step.run(tokens)
        return step.run(step.tokens.index_copy_(0, live, tokens)).index_select(0, live)

    def release(self) -> None:
        """Drop the result of ``prepare`` because rows are about to move."""
        self._current = None

    def _static(self, key: PlanKey, shares: list[TierShare], width: int) -> "_StaticStep":
        step = self._kept.get(key)
        if step is None:
            step = _StaticStep(self._model, self._buffers, shares, width, self._capture)
            self.plan_count += 1
            self._keep(key, step, _MAX_STEPS)
        assert isinstance(step, _StaticStep)
        self._kept.move_to_end(key)
        step.tokens.zero_()  # everywhere, because the scratch rows may have changed
        return step

    def _joined(self, key: PlanKey, shares: list[TierShare], width: int) -> DecodePlan:
        """Return the plan of these tiers, of parts that other combinations of tiers share."""
        joined = self._kept.get(key)
        if joined is None:
            parts, start = list[TierPlan](), 0
            for tier, share in zip(key[1:], shares, strict=True):
                parts.append(self._plan((tier, (-1, start, width)), share, width))
                start += share.rows
            joined = DecodePlan(self._buffers, parts, width)
            self._keep(key, joined, _MAX_PLANS)
        assert isinstance(joined, DecodePlan)
        self._kept.move_to_end(key)
        return joined

    def _plan(self, key: PlanKey, share: TierShare, width: int) -> TierPlan:
        plan = self._kept.get(key)
        if plan is None:
            plan = TierPlan(self._buffers, share, key[1][1], width)
            self.plan_count += 1
            self._keep(key, plan, _MAX_PLANS)
        assert isinstance(plan, TierPlan)
        self._kept.move_to_end(key)
        return plan

    def _keep(self, key: PlanKey, made: "DecodePlan | TierPlan | _StaticStep", most: int) -> None:
        self._kept[key] = made
        if len(self._kept) > most:
            self._kept.popitem(last=False)


class _StaticStep:
    """The decode step of one combination of buckets, over memory with fixed addresses."""

    def __init__(
        self,
        model: DecoderModel,
        buffers: StepBuffers,
        shares: list[TierShare],
        width: int,
        capture: Capture | None,
    ) -> None:
        starts = accumulate((share.rows for share in shares), initial=0)
        parts = [TierPlan(buffers, *each, width) for each in zip(shares, starts, strict=False)]
        plan = self.plan = DecodePlan(buffers, parts, width)
        tokens = torch.zeros(len(plan.positions), dtype=torch.int64, device=model.device)
        self.tokens = tokens
        """Input of the step, int64 [padded rows * width]; token 0 in scratch rows."""
        # Without ``self``: a cycle would keep the old memory of a moved block until the next garbage collection.
        self._work: Callable[[], object] = lambda: model.decode(tokens, plan)
        self._capture = capture
        self._ran = False

    @property
    def captures_next(self) -> bool:
        """Whether the next run captures."""
        return self._ran and self._capture is not None

    def run(self, tokens: Tensor) -> Tensor:
        """Decode ``tokens`` [padded rows * width], which may be ``self.tokens``; returns logits [tokens, vocab].

        The first run executes directly and is the warm-up that a capture needs. The second run captures.
        """
        if tokens is not self.tokens:
            self.tokens.copy_(tokens)
        if self._ran and self._capture is not None:
            self._work, self._capture = self._capture(self._work), None
        self._work()
        self._ran = True
        return self.plan.views.logits


def bucket(rows: int, most: int) -> int:
    """Return the smallest power of two that holds ``rows``, at most ``most``."""
    return min(1 << (rows - 1).bit_length(), most)


def _graph_capture(device: torch.device) -> Capture:
    """Return a function that captures work as a CUDA graph: the only part of the engine that a CPU cannot run.

    Not yet run on a GPU. All graphs share one stream and one memory pool for a step's temporary tensors: they must not
    run at the same time, and memory allocated during a capture must not be used after the step.
    """
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(work: Callable[[], object]) -> Callable[[], object]:
        # The work has run once before: kernels and library handles are set up on first use, which a capture forbids.
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        # torch.cuda.graph would also empty the allocator's cache, which takes longer than the capture.
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()

        def replay() -> None:
            with torch.cuda.device(device):  # the current device is per thread
                graph.replay()

        return replay

    return capture
