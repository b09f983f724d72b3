"""Step clock of one generator, in closed form: no event per token.

All running calls advance together, one token per decode step. A step of r calls that hold C context tokens takes
``a + b * C`` seconds, with a = base(r) and b = slope(r). While r is constant, C grows by r per step, so k steps take

    T(k) = k * A + k^2 * q / 2,    A = a + b * (C - r / 2),    q = b * r

seconds, exactly the sum over the steps. The next finish and the next full cache follow without a loop over the steps.
A change of the running set (arrival, cancel, load) takes effect between two steps: the step in progress ends with the
calls that it began with. A prefill stops decoding for the whole generator.

When the cache is full, the youngest call is preempted: it waits at the front and later pays for the prefill of all its
tokens again. Calls start in the order of their arrival.
"""

import heapq
import math
from collections import deque
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rollmesh.errors import ConfigError
from rollmesh.sim.decode_curve import EngineCosts

OnLoad = Literal["interrupt", "keep_kv"]
"""Effect of a new policy version on running calls; see ``GeneratorClock.reload``."""


class Finished(NamedTuple):
    """Call that has all its tokens."""

    call: int
    time: float
    token_count: int


@dataclass(slots=True, eq=False)
class _Call:
    number: int
    context: int
    """Tokens at arrival."""
    remaining: int
    """Tokens that are not decoded yet, when the call (re)started."""
    known: int
    """Tokens at arrival that were sampled or prefilled before, here or elsewhere."""
    tokens: int = 0
    """Tokens decoded before the call (re)started."""
    start: int = 0
    """Steps of the clock when the call (re)started."""
    order: int = -1
    """Position in the order of (re)starts; -1 while the call does not run."""


class GeneratorClock:
    """Calls of one generator in virtual time, seconds from 0; ``now`` only moves forward.

    Between ``advance(now)`` and the next one, changes happen at ``now``. Token counts are those of whole steps that
    have ended by ``now``.
    """

    def __init__(self, costs: EngineCosts, *, slots: int, cache_tokens: int, slow_factor: float = 1.0) -> None:
        """Start idle at 0. ``slow_factor`` multiplies the seconds of steps and prefills (a slow node: above 1)."""
        self.now = 0.0
        self.preemption_total = 0
        self.prefilled_tokens = 0
        """Tokens of all prefills, those of ``reprefilled_tokens`` included."""
        self.reprefilled_tokens = 0
        """Those of them after a preemption or an interrupting load, and what arriving calls bring along."""
        self._costs = costs
        self._slots = slots
        self._cache_tokens = cache_tokens
        self._slow_factor = slow_factor
        self._calls: dict[int, _Call] = {}
        self._running: dict[int, _Call] = {}
        """Running calls, the youngest last."""
        self._waiting: deque[_Call] = deque()
        self._heap: list[tuple[int, int, _Call]] = []
        """(steps at the finish, order, call); an entry is void once the call has another order."""
        self._starts = 0
        # The anchor: at _ready the next step begins, after _steps steps; the last of these ends at _step_end.
        self._steps = 0
        self._context = 0
        self._decoded = 0
        self._in_step = 0
        """Running calls of the step that ends at ``_step_end`` and have a token from it."""
        self._step_end = 0.0
        self._ready = 0.0
        self._first = self._half = 0.0
        """A and q / 2 of the running calls."""
        self._event_steps = 0
        self._event = math.inf
        self._call_seconds = 0.0
        self._counted = 0.0

    @property
    def running(self) -> int:
        """Number of running calls."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of calls that wait for a slot, for cache or for a load."""
        return len(self._waiting)

    @property
    def context_tokens(self) -> int:
        """Tokens in the cache."""
        return self._context + self._since_anchor()

    @property
    def decoded_tokens(self) -> int:
        """Tokens decoded so far, of all calls."""
        return self._decoded + self._since_anchor()

    @property
    def call_seconds(self) -> float:
        """Integral of ``running`` over time, in call seconds."""
        return self._call_seconds + len(self._running) * (self.now - self._counted)

    def next_event(self) -> float:
        """Return the time of the next finish or full cache; infinite when idle."""
        return self._event

    def advance(self, now: float) -> list[Finished]:
        """Move the clock to ``now``; return the calls that finish by then, in the order of time and start."""
        finished: list[Finished] = []
        while self._event <= now:
            self._pass_event(finished)
        self.now = now
        return finished

    def arrive(self, call: int, *, context: int, remaining: int, known: int = 0) -> None:
        """Add a call that holds ``context`` tokens and decodes ``remaining`` more; it waits if nothing is free.

        ``known`` tokens of the context were sampled or prefilled before: they count as prefilled again.
        """
        if context + remaining > self._cache_tokens:
            raise ConfigError(
                f"call={call}: context={context} and remaining={remaining} tokens do not fit the cache of "
                f"cache_tokens={self._cache_tokens}; use a larger cache or shorter lengths"
            )
        self._settle()
        self._calls[call] = added = _Call(call, context, remaining, known)
        self._waiting.append(added)
        self._start_waiting()
        self._plan()

    def cancel(self, call: int) -> int:
        """Remove a call; return its tokens so far. The token of a step in progress is dropped."""
        tokens = self.progress(call)
        self._settle()
        removed = self._calls.pop(call)
        if removed.order < 0:
            self._waiting.remove(removed)
        else:
            dropped = removed.tokens + self._steps - removed.start - tokens
            self._decoded -= dropped
            self._in_step -= dropped
            self._stop(removed)
        if self._waiting:
            self._start_waiting()
        self._plan()
        return tokens

    def progress(self, call: int) -> int:
        """Return the tokens decoded so far in this call."""
        found = self._calls[call]
        if found.order < 0:
            return found.tokens
        return found.tokens + max(0, self._steps + self._whole_steps() - found.start)

    def calls(self) -> list[int]:
        """Return the calls on this generator, running or waiting, in the order of arrival."""
        return list(self._calls)

    def slow_down(self, slow_factor: float) -> None:
        """Set the slow factor of all steps and prefills after the step in progress."""
        self._settle()
        self._slow_factor = slow_factor
        self._plan()

    def reload(self, seconds: float, *, mode: OnLoad) -> dict[int, int]:
        """Load a new policy version in ``seconds``, after the step in progress; return where new segments begin.

        That is the token count of each call that has started and continues under the new version; the token of a step
        in progress counts for the new one. ``interrupt`` prefills all running calls again, ``keep_kv`` keeps the cache.
        """
        steps = self._steps + self._whole_steps()
        boundaries = {
            number: call.tokens + max(0, steps - call.start) for number, call in self._calls.items() if call.order >= 0
        }
        boundaries |= {call.number: call.tokens for call in self._waiting if call.tokens}
        self._settle()
        self._begin_work()
        self._ready += seconds
        if mode == "interrupt":
            size = self._context - sum(map(self._cached, self._ending()))
            self._prefill(size, again=size)
        if self._waiting:
            self._start_waiting()
        self._plan()
        return boundaries

    def _ending(self) -> list[_Call]:
        if not self._heap or self._heap[0][0] > self._steps:
            return []
        return [call for call in self._running.values() if call.start + call.remaining <= self._steps]

    def _pass_event(self, finished: list[Finished]) -> None:
        """Move the anchor to the next event, finish or preempt calls there, and start those that wait."""
        running, steps, time = len(self._running), self._event_steps, self._event
        self._count_call_seconds(time)
        self.now = time
        if steps > 0:
            self._steps += steps
            self._context += steps * running
            self._decoded += steps * running
            self._in_step = running
            self._ready = self._step_end = time
        heap = self._heap
        while heap and heap[0][0] <= self._steps:
            _, order, call = heapq.heappop(heap)
            if call.order == order:
                tokens = call.tokens + call.remaining
                self._stop(call)
                del self._calls[call.number]
                finished.append(Finished(call.number, time, tokens))
        while self._context + len(self._running) > self._cache_tokens:
            self._preempt_youngest()
        if self._waiting:
            self._start_waiting()
        self._plan()

    def _plan(self) -> None:
        """Find the next event: the first finish, or the step before which the cache is full."""
        running, heap = len(self._running), self._heap
        if not running:
            self._event = math.inf
            return
        while heap[0][2].order != heap[0][1]:
            heapq.heappop(heap)
        slope = self._costs.slope[running]
        self._first = self._costs.base[running] + slope * (self._context - 0.5 * running)
        self._half = 0.5 * slope * running
        steps = min(heap[0][0] - self._steps, (self._cache_tokens - self._context) // running)
        self._event_steps = steps
        self._event = self._ready + self._seconds(steps) if steps > 0 else self._step_end

    def _seconds(self, steps: int) -> float:
        """Return T(steps) of the running calls from the anchor on."""
        return self._slow_factor * steps * (self._first + self._half * steps)

    def _whole_steps(self) -> int:
        """Return the steps that have ended by ``now`` since the anchor; -1 while the anchor's last one is under way."""
        if self.now < self._step_end:
            return -1
        past = self.now - self._ready
        if past <= 0 or not self._running:
            return 0
        first = self._slow_factor * self._first
        root = math.sqrt(first * first + 4 * self._slow_factor * self._half * past)
        steps = int(2 * past / (first + root))
        # The square root rounds: compare with the expression that dates events.
        while self._ready + self._seconds(steps + 1) <= self.now:
            steps += 1
        while steps and self._ready + self._seconds(steps) > self.now:
            steps -= 1
        return steps

    def _since_anchor(self) -> int:
        steps = self._whole_steps()
        return -self._in_step if steps < 0 else steps * len(self._running)

    def _settle(self) -> None:
        """Move the anchor to ``now``, or to the end of the step under way at ``now``."""
        self._count_call_seconds(self.now)
        running = len(self._running)
        if self.now <= self._ready or not running:
            return
        steps = self._whole_steps()
        end = self._ready + self._seconds(steps)
        if end < self.now:
            steps += 1
            end = self._ready + self._seconds(steps)
        self._ready = self._step_end = end
        self._steps += steps
        self._context += steps * running
        self._decoded += steps * running
        self._in_step = running

    def _start_waiting(self) -> None:
        waiting, running = self._waiting, self._running
        while waiting and len(running) < self._slots:
            call = waiting[0]
            size = call.context + call.tokens
            if self._context + size + len(running) + 1 > self._cache_tokens:
                return
            waiting.popleft()
            call.order, call.start = self._starts, self._steps
            self._starts += 1
            heapq.heappush(self._heap, (call.start + call.remaining, call.order, call))
            self._prefill(size, again=size if call.tokens else call.known)
            running[call.number] = call
            self._context += size

    def _stop(self, call: _Call) -> None:
        del self._running[call.number]
        call.order = -1
        self._context -= self._cached(call)

    def _cached(self, call: _Call) -> int:
        """Return the cached tokens of a running call at the anchor."""
        return call.context + call.tokens + self._steps - call.start

    def _preempt_youngest(self) -> None:
        call = next(reversed(self._running.values()))
        self._stop(call)
        decoded = self._steps - call.start
        call.tokens += decoded
        call.remaining -= decoded
        self._waiting.appendleft(call)
        self.preemption_total += 1

    def _prefill(self, tokens: int, *, again: int) -> None:
        self._begin_work()
        self._ready += self._slow_factor * tokens * self._costs.prefill_seconds_per_token
        self.prefilled_tokens += tokens
        self.reprefilled_tokens += again

    def _begin_work(self) -> None:
        self._ready = max(self._ready, self.now)

    def _count_call_seconds(self, time: float) -> None:
        self._call_seconds += len(self._running) * (time - self._counted)
        self._counted = time
