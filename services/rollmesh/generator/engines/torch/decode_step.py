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

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollmesh.generator.engines.torch.adapters import BASE
from rollmesh.generator.engines.torch.decoder_model import DecoderModel, StepPlan, TierPlan
from rollmesh.generator.engines.torch.kernels import Int64Array, as_pairs
from rollmesh.generator.engines.torch.kv_cache import KvCache, Tier, TierRows

Capture = Callable[[Callable[[], object]], Callable[[], object]]
"""Function that captures work over static memory and returns a function that replays it."""

_SPAN = 16
"""Attention spans are rounded up to a multiple of this, so that a plan is valid for several steps."""
_MAX_STEPS = 64
"""Maximum number of bucket combinations kept, with their graphs."""


class PlainStepper:
    """Decoder of exactly the rows in use, in the order of the cache's tiers."""

    def __init__(self, model: DecoderModel, cache: KvCache, slots: int) -> None:
        self._model = model
        self._cache = cache
        self._planner = _Planner(model, slots)
        self._plan: StepPlan | None = None

    def prepare(self, lengths: Int64Array, places: Int64Array | None = None) -> int:
        """Prepare steps for the active rows; returns the number of steps for which this is valid.

        ``lengths`` [rows] are the cached tokens of all rows in order, including held rows, and ``places`` [rows] the
        places of their adapters; None without adapters.
        """
        shares: list[_TierShare] = []
        active = np.zeros(len(lengths), np.bool_)
        steps, start = self._cache.longest, 0
        for tier in self._cache.tiers:
            used = slice(start, start + tier.active_count)
            start += len(tier.slots)
            if not tier.active_count:
                continue
            active[used] = True
            longest = int(lengths[used].max())
            span = min(tier.width, (longest // _SPAN + 1) * _SPAN)
            steps = min(steps, span - longest)
            shares.append(_TierShare(tier=tier, rows=tier.active_count, span=span))
        self._plan = self._planner.build(shares, self._planner.counters(lengths[active]))
        if self._model.adapters is not None and places is not None:
            self._model.adapters.arrange(places[active])
        return steps

    def logits(self, tokens: Tensor) -> Tensor:
        """Append ``tokens`` int64 [active]; returns the logits [active, vocab], valid until the next step."""
        assert self._plan is not None
        return self._model.decode(tokens, self._plan)

    def release(self) -> None:
        """Drop the result of ``prepare`` because rows are about to move."""
        self._plan = None


class BucketedStepper:
    """Decoder like ``PlainStepper`` with padded steps of static shape, made once per combination of buckets."""

    def __init__(self, model: DecoderModel, cache: KvCache, slots: int, capture: Capture | None) -> None:
        self._model = model
        self._cache = cache
        self._capture = capture
        # Rounding up to a power of two less than doubles the rows.
        self._planner = _Planner(model, 2 * slots, shared_score_tokens=cache.token_capacity)
        self._steps: OrderedDict[TierRows, _StaticStep] = cache.views
        self._current: _StaticStep | None = None
        self._live: Tensor | None = None
        """Rows of the padded step that belong to calls, int64 [rows]; None if all rows do."""

    def prepare(self, lengths: Int64Array, places: Int64Array | None = None) -> int:
        shares: list[tuple[int, _TierShare]] = []
        padded_lengths, padded_places, live = [], [], []
        steps, start, active, padded_start = self._cache.longest, 0, 0, 0
        for number, tier in enumerate(self._cache.tiers):
            first, start, used = start, start + len(tier.slots), tier.active_count
            if not used:
                continue
            rows = bucket(used, tier.row_capacity)
            # Held rows used as padding are written only after their tokens.
            here = lengths[first:start][:rows]
            steps = min(steps, tier.width - int(here.max()))
            padding = (0, rows - len(here))
            padded_lengths.append(np.pad(here, padding))
            if places is not None:
                padded_places.append(np.pad(places[first:start][:rows], padding, constant_values=BASE))
            live.append(np.arange(padded_start, padded_start + used))
            shares.append((number, _TierShare(tier=tier, rows=rows, span=tier.width)))
            active, padded_start = active + used, padded_start + rows
        self._current = self._step_of(shares)
        self._current.place(self._planner.counters(np.concatenate(padded_lengths)))
        if self._model.adapters is not None and padded_places:
            self._model.adapters.arrange(np.concatenate(padded_places))
        self._live = None
        if active < padded_start:
            self._live = torch.from_numpy(np.concatenate(live)).to(self._model.device)
        return steps

    def logits(self, tokens: Tensor) -> Tensor:
        step, live = self._current, self._live
        assert step is not None
        if live is None:
            return step.run(tokens)
        step.tokens.index_copy_(0, live, tokens)
        return step.run(None).index_select(0, live)

    def release(self) -> None:
        self._current = None

    def _step_of(self, shares: list[tuple[int, _TierShare]]) -> _StaticStep:
        key = tuple((number, share.rows) for number, share in shares)
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = _StaticStep(self._model, self._planner, [s for _, s in shares], self._capture)
            if len(self._steps) > _MAX_STEPS:
                self._steps.popitem(last=False)
        self._steps.move_to_end(key)
        return step


class _StaticStep:
    """The decode step of one combination of buckets, over memory with fixed addresses."""

    def __init__(
        self, model: DecoderModel, planner: _Planner, shares: list[_TierShare], capture: Capture | None
    ) -> None:
        rows = sum(share.rows for share in shares)
        self._counters = planner.counters(np.zeros(rows, np.int64))
        plan = planner.build(shares, self._counters)
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


Stepper = PlainStepper | BucketedStepper


def make_stepper(model: DecoderModel, cache: KvCache, slots: int, *, graphs: bool) -> Stepper:
    """Build the padded stepper if ``graphs`` is set (captured on a GPU only), else the plain one."""
    if not graphs:
        return PlainStepper(model, cache, slots)
    return BucketedStepper(model, cache, slots, _graph_capture(model.device) if model.device.type == "cuda" else None)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _TierShare:
    """Part of one tier in a plan: its first rows, over the first ``span`` tokens."""

    tier: Tier
    rows: int
    span: int


class _Planner:
    """Owner of the step buffers; builds plans over them."""

    def __init__(self, model: DecoderModel, row_count: int, *, shared_score_tokens: int = 0) -> None:
        """Allocate buffers for plans of at most ``row_count`` rows, of the model's type and device.

        All plans share one buffer for attention scores of at most ``shared_score_tokens`` (rows * span of a tier); 0
        gives each plan its own buffer.
        """
        arch, like = model.arch, model.weights.embedding
        self._arch = arch
        self._multiply = model.multiply
        self._scratch: Tensor | None = None
        if shared_score_tokens:
            self._scratch = like.new_empty((2, shared_score_tokens * arch.head_count))
        heads, group, size = arch.kv_head_count, arch.heads_per_kv, arch.head_size

        def buffer(*shape: int) -> Tensor:
            return like.new_empty((row_count, *shape))

        self._states = buffer(arch.hidden_size)
        self._normed = buffer(arch.hidden_size)
        self._change = buffer(arch.hidden_size)
        self._qkv = buffer(heads, group + 2, size)
        self._attended = buffer(heads, group, size)
        self._gate_up = buffer(2 * arch.mlp_size)
        self._gated = buffer(arch.mlp_size)
        self._logits = buffer(arch.vocab_size)
        self._rows = torch.arange(row_count * heads, device=like.device)

    def counters(self, lengths: Int64Array) -> Tensor:
        """Return the next position of every row and kv head, int64 [rows * kv_heads]."""
        return torch.from_numpy(np.repeat(lengths, self._arch.kv_head_count)).to(self._rows.device)

    def build(self, shares: Iterable[_TierShare], counters: Tensor) -> StepPlan:
        """Build the plan for these shares of the tiers; a step advances ``counters`` [rows * kv_heads]."""
        arch, op, heads = self._arch, self._multiply.operand, self._arch.kv_head_count
        parts: list[TierPlan] = []
        count = 0
        for share in shares:
            parts.append(self._tier(share, count, counters))
            count += share.rows
        qkv, gate_up, gated = self._qkv[:count], self._gate_up[:count], self._gated[:count]
        normed, change, logits = self._normed[:count], self._change[:count], self._logits[:count]
        attended = self._attended[:count].view(count, -1)
        flat, rotated = qkv.view(count, -1), qkv[:, :, : arch.heads_per_kv + 1]
        return StepPlan(
            tiers=tuple(parts),
            counters=counters,
            positions=counters[::heads],
            states=self._states[:count],
            normed=normed,
            normed_op=op(normed),
            qkv=flat,
            qkv_op=op(flat),
            heads=rotated,
            pairs=as_pairs(rotated) if rotated.dtype == torch.float32 else None,
            attended=attended,
            attended_op=op(attended),
            gate_up=gate_up,
            gate_up_op=op(gate_up),
            gate=gate_up[:, : arch.mlp_size],
            up=gate_up[:, arch.mlp_size :],
            gated=gated,
            gated_op=op(gated),
            change=change,
            change_op=op(change),
            logits=logits,
            logits_op=op(logits),
        )

    def _tier(self, share: _TierShare, start: int, counters: Tensor) -> TierPlan:
        arch, op, group = self._arch, self._multiply.operand, self._arch.heads_per_kv
        heads, tier, span = arch.kv_head_count, share.tier, share.span
        stop = start + share.rows
        used = share.rows * heads
        qkv = self._qkv[start:stop].view(used, group + 2, arch.head_size)
        # Layers stay together until the end: one unbind instead of one slice per layer.
        keys, values, mask = tier.keys[:, :used], tier.values[:, :used], tier.mask[:used]
        score_shape = (2, used, group, span)
        if self._scratch is None:
            scores, shares = self._qkv.new_empty(score_shape)
        else:
            scores, shares = self._scratch[:, : math.prod(score_shape[1:])].view(score_shape)
        return TierPlan(
            place=(self._rows[:used], counters[start * heads : stop * heads]),
            keys=keys.transpose(2, 3).unbind(0),
            values=values.unbind(0),
            mask=mask[:, 0],
            new_key=qkv[:, group],
            new_value=qkv[:, group + 1],
            query_op=op(qkv[:, :group]),
            span_key_ops=tuple(op(layer) for layer in keys[..., :span].unbind(0)),
            span_value_ops=tuple(op(layer) for layer in values[:, :, :span].unbind(0)),
            span_mask=mask[..., :span],
            scores=scores,
            scores_op=op(scores),
            shares=shares,
            shares_op=op(shares),
            attended_op=op(self._attended[start:stop].view(used, group, arch.head_size)),
        )
