"""Reference of the step clock: the same rules, one token after the other."""

from dataclasses import dataclass, field

from rollmesh.sim.decode_curve import EngineCosts
from rollmesh.sim.generator_clock import Finished, OnLoad


@dataclass(eq=False)
class SteppedCall:
    number: int
    context: int
    remaining: int
    known: int
    tokens: int = 0

    @property
    def size(self) -> int:
        return self.context + self.tokens


@dataclass
class SteppingEngine:
    costs: EngineCosts
    slots: int
    cache_tokens: int
    slow_factor: float
    now: float = 0.0
    ready: float = 0.0
    preemption_total: int = 0
    prefilled_tokens: int = 0
    reprefilled_tokens: int = 0
    running: list[SteppedCall] = field(default_factory=list)
    waiting: list[SteppedCall] = field(default_factory=list)
    in_step: list[SteppedCall] | None = None
    """Calls of the step in progress, which ends at ``step_end``."""
    step_end: float = 0.0
    decoded_tokens: int = 0

    def advance(self, now: float) -> list[Finished]:
        finished: list[Finished] = []
        while True:
            if self.in_step is not None and self.step_end <= now:
                self.now = self.step_end
                finished += self.end_step()
            elif self.in_step is None and self.running and self.ready < now:
                context = sum(call.size for call in self.running)
                self.in_step = list(self.running)
                self.step_end = self.ready + self.slow_factor * self.costs.step(len(self.running), context)
                self.ready = self.step_end
            else:
                self.now = now
                return finished

    def end_step(self) -> list[Finished]:
        finished = []
        for call in self.in_step or ():
            if call in self.running:
                call.tokens += 1
                self.decoded_tokens += 1
                if call.tokens == call.remaining:
                    self.running.remove(call)
                    finished.append(Finished(call.number, self.now, call.tokens))
        self.in_step = None
        while sum(call.size + 1 for call in self.running) > self.cache_tokens:
            self.waiting.insert(0, self.running.pop())
            self.preemption_total += 1
        self.start()
        return finished

    def start(self) -> None:
        while self.waiting and len(self.running) < self.slots:
            call = self.waiting[0]
            after_step = sum(self.size_after_step(other) for other in self.running)
            if after_step + call.size + len(self.running) + 1 > self.cache_tokens:
                break
            self.running.append(self.waiting.pop(0))
            self.prefill(call.size, again=call.size if call.tokens else call.known)

    def size_after_step(self, call: SteppedCall) -> int:
        return call.size + (self.in_step is not None and call in self.in_step)

    def prefill(self, tokens: int, *, again: int) -> None:
        self.ready = max(self.ready, self.now) + self.slow_factor * tokens * self.costs.prefill_seconds_per_token
        self.prefilled_tokens += tokens
        self.reprefilled_tokens += again

    def arrive(self, number: int, *, context: int, remaining: int, known: int) -> None:
        self.waiting.append(SteppedCall(number, context, remaining, known))
        self.start()

    def find(self, number: int) -> SteppedCall:
        return next(call for call in [*self.running, *self.waiting] if call.number == number)

    def cancel(self, number: int) -> int:
        call = self.find(number)
        (self.running if call in self.running else self.waiting).remove(call)
        self.start()
        return call.tokens

    def reload(self, seconds: float, *, mode: OnLoad) -> dict[int, int]:
        boundaries = {call.number: call.tokens for call in self.running}
        boundaries |= {call.number: call.tokens for call in self.waiting if call.tokens}
        self.ready = max(self.ready, self.now) + seconds
        if mode == "interrupt":
            sizes = [(self.size_after_step(call), call) for call in self.running]
            size = sum(n for n, call in sizes if n < call.context + call.remaining)
            self.prefill(size, again=size)
        self.start()
        return boundaries
