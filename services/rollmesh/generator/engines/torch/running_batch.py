"""The running calls: one decode step for all of them (``step``), and their start and end. Model thread only."""

import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rollmesh.errors import EngineError
from rollmesh.generator.engines.engine_protocol import EngineCounters
from rollmesh.generator.engines.torch.adapters import BASE, Factors
from rollmesh.generator.engines.torch.decode_step import Stepper
from rollmesh.generator.engines.torch.decoder_model import DecoderModel, Past, prefill_batches
from rollmesh.generator.engines.torch.kept_prefixes import Prefix
from rollmesh.generator.engines.torch.kernels import Int64Array
from rollmesh.generator.engines.torch.kv_cache import KvCache
from rollmesh.generator.engines.torch.sampling import BoolArray, RowOrder, sample
from rollmesh.generator.engines.torch.slots import RunningCall, SlotTable
from rollmesh.generator.engines.torch.speculation import Speculation
from rollmesh.kept_sets import split_sets
from rollmesh.types import Chunk, FinishReason, Float32Array, Int32Array, KeptSets

_HISTORY = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """Call that starts: the first ``count`` of its ``ids`` are copied from ``source``, the others computed."""

    call: RunningCall
    ids: Int32Array
    source: Prefix | None
    count: int


class RunningBatch:
    """Calls in slots over one model and one cache.

    A call's context is prefilled without its last token, which is the input of the call's first decode step. So every
    token is sampled in a decode step, and a prefill computes only what no row and no kept prefix begins with.
    """

    def __init__(
        self,
        model: DecoderModel,
        cache: KvCache,
        stepper: Stepper,
        slot_count: int,
        policy_version: int,
        speculation: Speculation | None = None,
    ) -> None:
        self.model = model
        self.speculation = speculation
        self.adapters = model.adapters
        self.cache = cache
        self.policy_version = policy_version
        self.counters = EngineCounters()
        self.decode_steps = 0
        self.decode_seconds = 0.0
        self.outbox: list[tuple[RunningCall, Chunk | Exception]] = []
        """Chunks and final errors to deliver to the callers."""
        self.response_lengths: deque[int] = deque(maxlen=_HISTORY)
        """Lengths of finished responses, for ``remaining_estimate``."""
        self.slots = SlotTable(slot_count, model.arch.vocab_size, model.device)
        self._stepper = stepper
        self._order: RowOrder | None = None
        self._planned_steps = 0
        """Steps until a row outgrows the prepared step or its tier."""
        self._outgrown = True
        """Whether a row may have outgrown its tier; valid while ``_order`` is."""
        self._tokens = torch.empty(0, dtype=torch.int64)
        self._rows = np.zeros(0, np.int64)
        """Slots of all rows of the cache, in order, while ``_order`` is valid."""
        self._widths = np.zeros(0, np.int64)
        """Widths of all rows, while ``_order`` is valid."""
        self._rests_until = 0
        """Step before which speculation is not asked for drafts; valid while ``_order`` is."""
        self._rested_from: int | None = None
        """Step since which it rests."""
        self._held: dict[RunningCall, float] = {}
        """Calls held because their callers are late to save, with the start of the hold (monotonic seconds)."""
        self._prefixes: dict[int, Prefix] = {}
        """Beginnings of the slots' rows that further calls may copy."""

    @property
    def running_count(self) -> int:
        return len(self.slots.calls) - len(self.slots.free)

    @property
    def active_count(self) -> int:
        """Calls for which the next step samples a token: calls in slots that are not held."""
        return self.running_count - len(self._held)

    @property
    def held_since(self) -> float | None:
        """Start of the oldest hold in monotonic seconds; None without held calls."""
        return min(self._held.values(), default=None)

    def step(self) -> None:
        """Sample a token, or several, for every active call and emit the chunks due; requires an active call."""
        order, speculation = self._arranged(), self.speculation
        if speculation is None or self.decode_steps < self._rests_until:
            self._plain_step(order)
            return
        self._end_rest(order)
        rows = len(order.slots)
        if resting := speculation.begin_step(rows):
            self._rested_from, self._rests_until = self.decode_steps, self.decode_steps + resting
            self._plain_step(order)
            return
        started, before, plans = speculation.clock(), self.counters.generated_token_total, self._stepper.plan_count
        if not speculation.drafts_with(rows):
            if order.ahead is not None:
                order.settle()
            self._plain_step(order)
        elif not self._draft_step(order, speculation):
            self._plain_step(order)
        tokens = self.counters.generated_token_total - before
        new_plan = self._stepper.plan_count > plans
        speculation.measure(rows, tokens, speculation.clock() - started, new_plan=new_plan)

    def _end_rest(self, order: RowOrder) -> None:
        """Count the steps in which speculation has rested, if it has; ask it before the next one."""
        if self.speculation is not None and self._rested_from is not None:
            self.speculation.rested(len(order.slots), self.decode_steps - self._rested_from)
        self._rested_from, self._rests_until = None, 0

    def _arranged(self) -> RowOrder:
        """Return the order of the active calls' rows, which lasts until rows change."""
        if self._order is None:
            self.cache.hold({c.slot for c in self._held})
            tiers = self.cache.tiers
            self._rows = np.array([slot for tier in tiers for slot in tier.slots], np.int64)
            slots = np.array([slot for tier in tiers for slot in tier.slots[: tier.active_count]], np.int64)
            self._widths = np.repeat([tier.width for tier in tiers], [len(tier.slots) for tier in tiers])
            self._order = self.slots.arrange(slots)
            self._tokens = torch.from_numpy(self.slots.last_tokens[slots]).to(self.model.device)
        return self._order

    def _plain_step(self, order: RowOrder) -> None:
        """Sample a token for every active call."""
        if self._planned_steps <= 0:
            self._planned_steps = self._stepper.prepare(self.slots.cached(self._rows), self.slots.places[self._rows])
        logits = self._stepper.logits(self._tokens)
        drawn = sample(logits, order.next_noise(), order.sampling)
        self._tokens = drawn.tokens
        self._postprocess(order, drawn.tokens.cpu().numpy(), drawn.logprobs.cpu().numpy(), drawn.kept_sets)

    def _draft_step(self, order: RowOrder, speculation: Speculation) -> bool:
        """Sample the tokens of all places of drafts, each with its noise; keep those whose context was sampled.

        Returns whether there are drafts.
        """
        lengths = self.slots.cached(self._rows)
        free_places = int((self._widths - lengths).min())
        last = self._tokens.tolist()
        proposal = speculation.propose(order, last, self.slots, free_places)
        if proposal is None:
            return False
        slots, width, device = order.slots, proposal.width, self.model.device
        self._stepper.prepare(lengths, self.slots.places[self._rows], width)
        logits = self._stepper.logits(torch.from_numpy(np.array(proposal.inputs(last))).to(device))
        by_token = order.sampling if order.sampling.plain else self.slots.sampling_of(np.repeat(slots, width))
        drawn = sample(logits, order.noise_of(width), by_token)
        tokens = drawn.tokens.cpu().numpy().reshape(-1, width)
        logprobs = drawn.logprobs.cpu().numpy().reshape(-1, width)
        drawn_ids = tokens.tolist()
        kept = proposal.kept(drawn_ids)
        counts, most, total = np.array(kept), max(kept), sum(kept)
        sets: list[tuple[int, Int32Array]] = []
        if drawn.kept_sets is not None:
            each = zip(by_token.keeping.tolist(), split_sets(drawn.kept_sets), strict=True)
            sets = [(int(slots[at // width]), ids) for at, ids in each if at % width < kept[at // width]]
        self.slots.record_wide(counts, total, tokens, logprobs, sets)
        order.advance(counts, most)
        speculation.verified(slots, last, proposal, kept)
        newest = [row[count - 1] for row, count in zip(drawn_ids, kept, strict=True)]
        self._tokens = torch.from_numpy(np.array(newest)).to(device)
        self._planned_steps = 0
        order.steps_left -= most
        if order.steps_left <= 0:  # those that have advanced most need not be those with the least room
            order.steps_left = self.slots.steps_left(slots)
        self.decode_steps += 1
        self.counters.generated_token_total += total
        if order.steps_left <= 0 or not order.stop_ids.isdisjoint(newest) or not logprobs.min() > -np.inf:
            finite = [np.isfinite(row[:count]).all() for row, count in zip(logprobs, kept, strict=True)]
            self._end_or_deliver(order, np.array(newest), np.array(finite))
        self._outgrown = most >= free_places
        return True

    def _postprocess(self, order: RowOrder, tokens: Int64Array, logprobs: Float32Array, sets: KeptSets | None) -> None:
        """Record the tokens of a step, [rows] each; look at single calls only if one has ended or a chunk is due."""
        self.slots.record(tokens, logprobs, sets)
        self._planned_steps -= 1
        self._outgrown = self._planned_steps <= 0
        order.steps_left -= 1
        self.decode_steps += 1
        self.counters.generated_token_total += len(tokens)
        ended = order.steps_left <= 0 or not order.stop_ids.isdisjoint(tokens.tolist())
        if ended or not logprobs.min() > -np.inf:  # NaN compares as False
            self._end_or_deliver(order, tokens, np.isfinite(logprobs))

    def _end_or_deliver(self, order: RowOrder, tokens: Int64Array, finite: BoolArray) -> None:
        """End the calls whose newest of the ``tokens``, [rows], is their last; deliver the chunks that are due."""
        stopped, (due, spent) = order.stopped(tokens), self.slots.due(order.slots)
        for row in np.flatnonzero(stopped | spent | due | ~finite):
            call = self.slots.calls[order.slots[row]]
            assert call is not None
            if not finite[row]:
                name, version = call.request.trajectory_id, self._version_of(call)
                error = EngineError(f"the logits of {name} are not finite under policy version {version}")
                self.outbox.append((call, error))
                self.remove(call)
            elif stopped[row]:
                self._finish(call, FinishReason.STOP)
            elif spent[row]:
                self._finish(call, FinishReason.LENGTH)
            else:
                self._cut_chunk(call)
                self._hold_if_blocked(call)
        if self._order is not None:
            order.steps_left = self.slots.steps_left(order.slots)

    def admit(self, calls: Sequence[RunningCall]) -> None:
        """Prefill calls and put them into slots; the caller has checked free slots and cache room."""
        self._write_back()
        prefixes = self.cache.prefixes
        first: list[_Start] = []
        after: list[_Start] = []  # those that copy from one of the first
        for call in calls:
            context = call.context_ids()
            ids = context[:-1]
            place = BASE
            if self.adapters is not None:
                if call.adapter_version is None:
                    call.adapter_version = self.policy_version
                place = self.adapters.place_of(call.adapter_version)
            slot = self.slots.occupy(call, int(context[-1]), len(ids), place)
            if self.speculation is not None:
                self.speculation.begin(call)
            self.cache.add(slot, len(ids))
            version = call.kv_min_version = call.newest_version = self._version_of(call)
            source, count = prefixes.longest(version, ids)
            start = _Start(call=call, ids=ids, source=source, count=count)
            self._prefixes[slot] = Prefix(policy_version=version, token_ids=ids, slot=slot)
            if source is not None and source.slot in {other.call.slot for other in first}:
                after.append(start)
            else:
                first.append(start)
                prefixes.add(self._prefixes[slot])
        for start in after:
            prefixes.add(self._prefixes[start.call.slot])
        for starts in (first, after):
            for start in starts:
                self._copy(start)
            unfinished = [start for start in starts if start.count < len(start.ids)]
            self._prefill([start for start in unfinished if not start.count])
            self._prefill([start for start in unfinished if start.count])
        for call in calls:
            self._hold_if_blocked(call)

    def cached_count(self, call: RunningCall) -> int:
        """Return the tokens of a waiting call's context that need no prefill."""
        return self.cache.prefixes.longest(self._version_of(call), call.context_ids()[:-1])[1]

    def _copy(self, start: _Start) -> None:
        if start.source is not None:
            self.cache.write(start.call.slot, *self.cache.read_prefix(start.source, start.count))
            start.call.cached_token_count = start.count
            self.counters.cached_token_total += start.count

    def _prefill(self, starts: list[_Start]) -> None:
        """Compute what the starts do not copy; all of them copy something, or none does."""
        for batch in prefill_batches([len(start.ids) for start in starts], self.model.forward_tokens):
            chosen = [starts[i] for i in batch]
            tokens = np.zeros((len(chosen), max(len(s.ids) - s.count for s in chosen)), np.int64)
            for row, s in enumerate(chosen):
                tokens[row, : len(s.ids) - s.count] = s.ids[s.count :]
                self.counters.prefill_token_total += len(s.ids) - s.count
                known = max(s.count, s.call.request.prompt_token_count)
                self.counters.reprefill_token_total += max(0, len(s.ids) - known)
            places = self.slots.places[[s.call.slot for s in chosen]]
            past = Past.of([self.cache.read(s.call.slot, s.count) for s in chosen]) if chosen[0].count else None
            keys, values = self.model.prefill(torch.from_numpy(tokens).to(self.model.device), places, past)
            for row, s in enumerate(chosen):
                new = len(s.ids) - s.count
                self.cache.write(s.call.slot, keys[:, row, ..., :new], values[:, row, :, :new], s.count)

    def _hold_if_blocked(self, call: RunningCall) -> None:
        if call.backlog.blocked:
            self._write_back()
            self._held[call] = time.monotonic()
            self.counters.held_back_total += 1

    def release_unblocked(self) -> None:
        """Continue held calls whose callers have saved enough tokens."""
        for call in [c for c in self._held if not c.backlog.blocked]:
            self._write_back()
            del self._held[call]
            self.slots.schedule_chunk(call)

    def end_held(self, since: float) -> None:
        """End calls as interrupted that have been held since ``since`` (monotonic seconds) or longer."""
        self.interrupt([c for c, at in self._held.items() if at <= since])

    def interrupt(self, calls: Iterable[RunningCall], *, kept: bool = True) -> None:
        for call in calls:
            self._finish(call, FinishReason.INTERRUPTED, kept=kept)

    def swap(self, policy_version: int) -> None:
        """Close every open chunk under the old version; further tokens carry the new one.

        Running calls keep their cache and its kv_min_version; the caller has removed those without a token. A call with
        tokens of a newer version than the new one ends as interrupted. Cached prompts have the old version, so calls
        that start later must not copy them.
        """
        for call in self.slots.running():
            undelivered = self.slots.undelivered(call.slot)
            if policy_version < (self.policy_version if undelivered else call.newest_version):
                self._finish(call, FinishReason.INTERRUPTED)
            elif undelivered:
                self._cut_chunk(call)
        if self._order is not None:
            self._order.steps_left = self.slots.steps_left(self._order.slots)
        self.policy_version = policy_version
        self._forget_prefixes()

    def forget_drafts(self) -> None:
        """Drop the history: its tokens mean something else under another tokenizer."""
        if self.speculation is not None:
            self.speculation.forget()

    def put_adapter(self, version: int, factors: Factors) -> None:
        """Load an adapter beside the others; no call uses it until it is in service."""
        adapters = self.adapters
        assert adapters is not None
        if any(call.adapter_version == version for call in self.slots.running()):
            return  # it is the same adapter: a version is never published twice
        if version not in adapters.versions and len(adapters.versions) == adapters.place_count:
            self._write_back()
            adapters.reserve(2 * adapters.place_count)
            self.cache.views.clear()
        adapters.put(version, factors)

    def serve_adapter(self, version: int, kept_versions: int, waited_for: Collection[int]) -> None:
        """Let calls that start from now on use a version; drop what is neither among the newest ones nor in use."""
        adapters = self.adapters
        assert adapters is not None
        newest = sorted(adapters.versions)[-kept_versions:]
        used = {version, *newest, *waited_for, *(call.adapter_version for call in self.slots.running())}
        if version != self.policy_version:
            self._forget_prefixes()
        self.policy_version = version
        for old in [v for v in adapters.versions if v not in used]:
            adapters.drop(old)

    def _forget_prefixes(self) -> None:
        self.cache.prefixes.clear()
        self._prefixes.clear()

    def _version_of(self, call: RunningCall) -> int:
        return self.policy_version if call.adapter_version is None else call.adapter_version

    def make_room(self) -> list[RunningCall]:
        """Move rows that have outgrown their tier; returns the calls preempted for lack of cache.

        Held calls end first, as interrupted. Then the youngest call is preempted, so the oldest call always continues
        and the queue always advances.
        """
        preempted: list[RunningCall] = []
        if self._order is not None and not self._outgrown:
            return preempted
        # Widest first: a tier must move its outgrown rows before it receives others.
        for tier in [tier for tier in reversed(self.cache.tiers[:-1]) if tier.slots]:
            while len(at := np.flatnonzero(self.slots.cached(np.array(tier.slots, np.int64)) >= tier.width)):
                grown = [tier.slots[i] for i in at]
                gain = self.cache.next_width(grown[0]) - tier.width
                if self.cache.has_room([gain] * len(grown)):
                    self._write_back()
                    self.cache.promote(tier, grown)
                    continue
                self.counters.preemption_total += 1
                if self._held:
                    self.interrupt([max(self._held, key=lambda c: c.arrival)])
                    continue
                victim = max(self.slots.running(), key=lambda c: c.arrival)
                if self.slots.undelivered(victim.slot):
                    self._cut_chunk(victim)
                self.remove(victim)
                preempted.append(victim)
        return preempted

    def _cut_chunk(self, call: RunningCall, reason: FinishReason | None = None) -> None:
        chunk = self.slots.take_chunk(call, self._version_of(call), reason)
        if len(chunk.token_ids):
            call.newest_version = chunk.policy_version
            call.backlog.add(len(chunk.token_ids))
        self.outbox.append((call, chunk))

    def _finish(self, call: RunningCall, reason: FinishReason, *, kept: bool = True) -> None:
        self._cut_chunk(call, reason)
        finished = reason in (FinishReason.STOP, FinishReason.LENGTH)
        if finished:
            self.response_lengths.append(call.position)
        self.remove(call, kept=kept, finished=finished)

    def remove(self, call: RunningCall, *, kept: bool = False, finished: bool = False) -> None:
        """End a call; ``kept`` keeps its delivered tokens in the cache, for a call that continues them."""
        self._write_back()
        if self.speculation is not None:
            self.speculation.end(call, finished=finished)
        slot, version = call.slot, self._version_of(call)
        self._held.pop(call, None)
        if (prefix := self._prefixes.pop(slot, None)) is not None:
            self.cache.prefixes.remove(prefix)
        if kept and call.kv_min_version == version:
            self.cache.keep(slot, version, call.context_ids()[: int(self.slots.cached(slot))])
        self.cache.remove(slot)
        self.slots.vacate(slot)

    def remove_calls_without_tokens(self) -> list[RunningCall]:
        found = [c for c in self.slots.running() if not c.started and not self.slots.undelivered(c.slot)]
        for call in found:
            self.remove(call)
            call.cached_token_count = 0
        return found

    def _write_back(self) -> None:
        """Write the state in row order back to the slots before rows move."""
        if self._order is not None:
            self.slots.last_tokens[self._order.slots] = self._tokens.cpu().numpy()
            self._end_rest(self._order)
            self._order = None
            self._planned_steps = 0
            self._stepper.release()
