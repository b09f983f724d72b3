"""One decode step for the rows in the cache: planned for the exact rows, or padded to static shapes.

Slicing a tensor takes about as long as multiplying two small ones, so a plan contains every view that a step reads or
writes, and is reused until the rows change. One in-place addition advances all positions.

A CUDA graph replays fixed shapes at fixed addresses. So the padded step rounds the rows of every tier up to a bucket
(1, 2, 4, 8 ... or all rows of the tier's block) and attends over the tier's whole width. Rows beyond those in use are
scratch: they belong to no call and decode token 0 from position 0. Their writes are overwritten or masked when a call
takes the row. The row of a held call may be scratch too, after the end of its tokens; ``KvCache.trim`` masks these
writes. Every row reads only its own cache, so padding cannot affect a call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from rollmesh.generator.engines.torch.adapters import BASE
from rollmesh.generator.engines.torch.decoder_model import DecodePlan, DecoderModel, StepBuffers, TierShare
from rollmesh.generator.engines.torch.kernels import Int64Array
from rollmesh.generator.engines.torch.kv_cache import KvCache, TierRows

Capture = Callable[[Callable[[], object]], Callable[[], object]]
"""Function that captures work over static memory and returns a function that replays it."""

_SPAN = 16
"""Attention spans are rounded up to a multiple of this, so that a plan is valid for several steps."""
_MAX_STEPS = 64
"""Maximum number of bucket combinations kept, with their graphs."""


class Stepper:
    """Decoder of the rows in use, in the order of the cache's tiers.

    ``padded`` steps have static shapes and are made once per combination of buckets.
    """

    def __init__(
        self, model: DecoderModel, cache: KvCache, slots: int, *, padded: bool = False, capture: Capture | None = None
    ) -> None:
        """Create a decoder of at most ``slots`` rows; without ``capture``, padded steps are captured on a GPU only."""
        self._model = model
        self._cache = cache
        self._padded = padded
        self._capture = capture
        if padded and capture is None and model.device.type == "cuda":
            self._capture = _graph_capture(model.device)
        # Rounding up to a power of two less than doubles the rows.
        scores = {"shared_score_tokens": cache.token_capacity} if padded else {}
        self._buffers = StepBuffers(model, 2 * slots if padded else slots, **scores)
        self._steps: OrderedDict[TierRows, _StaticStep] = cache.views
        self._current: DecodePlan | _StaticStep | None = None
        self._live: Tensor | None = None
        """Rows of the padded step that belong to calls, int64 [rows]; None if all rows do."""

    def prepare(self, lengths: Int64Array, places: Int64Array | None = None) -> int:
        """Prepare steps for the active rows; returns the number of steps for which this is valid.

        ``lengths`` [rows] are the cached tokens of all rows in order, including held rows, and ``places`` [rows] the
        places of their adapters; None without adapters.
        """
        shares: list[TierShare] = []
        rows: list[int] = []  # of the step: numbers of rows in ``lengths``, -1 for padding
        live: list[int] = []
        steps, start = self._cache.longest, 0
        for tier in self._cache.tiers:
            first, start, used = start, start + len(tier.slots), tier.active_count
            if not used:
                continue
            count = bucket(used, tier.row_capacity) if self._padded else used
            stop = min(start, first + count)  # held rows used as padding are written only after their tokens
            longest = int(lengths[first:stop].max())
            span = tier.width if self._padded else min(tier.width, (longest // _SPAN + 1) * _SPAN)
            steps = min(steps, span - longest)
            live += range(len(rows), len(rows) + used)
            rows += [*range(first, stop), *[-1] * (first + count - stop)]
            shares.append(TierShare(tier, count, span))
        counters = self._buffers.counters(np.append(lengths, 0)[rows])
        if self._model.adapters is not None and places is not None:
            self._model.adapters.arrange(np.append(places, BASE)[rows])
        if not self._padded:
            self._current = DecodePlan(self._buffers, shares, counters)
            return steps
        self._current = self._static_step(shares)
        self._current.place(counters)
        self._live = torch.tensor(live, device=self._model.device) if len(live) < len(rows) else None
        return steps

    def logits(self, tokens: Tensor) -> Tensor:
        """Append ``tokens`` int64 [active]; returns the logits [active, vocab], valid until the next step."""
        step, live = self._current, self._live
        assert step is not None
        if isinstance(step, DecodePlan):
            return self._model.decode(tokens, step)
        if live is None:
            return step.run(tokens)
        step.tokens.index_copy_(0, live, tokens)
        return step.run(None).index_select(0, live)

    def release(self) -> None:
        """Drop the result of ``prepare`` because rows are about to move."""
        self._current = None

    def _static_step(self, shares: list[TierShare]) -> _StaticStep:
        key = tuple((self._cache.tiers.index(share.tier), share.rows) for share in shares)
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = _StaticStep(self._model, self._buffers, shares, self._capture)
            if len(self._steps) > _MAX_STEPS:
                self._steps.popitem(last=False)
        self._steps.move_to_end(key)
        return step


class _StaticStep:
    """The decode step of one combination of buckets, over memory with fixed addresses."""

    def __init__(
        self, model: DecoderModel, buffers: StepBuffers, shares: list[TierShare], capture: Capture | None
    ) -> None:
        rows = sum(share.rows for share in shares)
        self._counters = buffers.counters(np.zeros(rows, np.int64))
        plan = DecodePlan(buffers, shares, self._counters)
        tokens = torch.zeros(rows, dtype=torch.int64, device=model.device)
        self.tokens = tokens
        """Input of the step, int64 [padded rows]; token 0 in scratch rows."""
        self._logits = plan.logits
        # Without ``self``: a cycle would keep the old memory of a moved block until the next garbage collection.
        self._work: Callable[[], object] = lambda: model.decode(tokens, plan)
        self._capture = capture
        self._ran = False

    def place(self, counters: Tensor) -> None:
        """Set the next position of every row, and token 0 everywhere because the scratch rows may have changed."""
        self._counters.copy_(counters)
        self.tokens.zero_()

    def run(self, tokens: Tensor | None) -> Tensor:
        """Decode ``tokens`` [padded rows], or ``self.tokens`` for None; returns logits [padded rows, vocab].

        The first run executes directly and is the warm-up that a capture needs. The second run captures.
        """
        if tokens is not None:
            self.tokens.copy_(tokens)
        if self._ran and self._capture is not None:
            self._work, self._capture = self._capture(self._work), None
        self._work()
        self._ran = True
        return self._logits


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
