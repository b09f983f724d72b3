"""Generators of a simulated mesh: calls placed by the mesh's router, policies loaded by its reload rules."""

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from rollmesh.mesh import EngineLoad
from rollmesh.scheduling.next_policy import ReloadRules, next_policy
from rollmesh.sim.decode_curve import EngineCosts
from rollmesh.sim.event_clock import EventClock
from rollmesh.sim.generator_clock import GeneratorClock
from rollmesh.sim.simulated_calls import SimulatedGenerator, SimulatedTrajectory
from rollmesh.sim.simulated_drafts import SimulatedDrafts
from rollmesh.types import GeneratorRecord, PolicyRecord, VersionNeed
from rollmesh.worker.routing import Candidates, Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """Sizes and times of the generators."""

    count: int
    slots: int
    cache_tokens: int
    costs: EngineCosts
    fetch_seconds: float
    """Time to read a new policy, during which the old one serves."""
    swap_seconds: float
    """Time during which a generator decodes nothing, because it swaps weights."""
    on_new_version: Literal["interrupt", "keep_kv", "drain"]
    rules: ReloadRules
    placement: Placement = Placement.CALLS
    drafts: SimulatedDrafts | None = None
    """Drafts of the engines; None decodes one token a step."""
    class_lengths: tuple[float, ...] = ()
    """Length of a response of each class of ``drafts``."""

    def token_costs(self) -> EngineCosts:
        """Return the costs of a token of every running call."""
        return self.costs if self.drafts is None else self.drafts.costs(self.costs, self.slots, self.class_lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetWork:
    """Work of all generators so far; every number only increases."""

    decoded_tokens: int = 0
    prefilled_tokens: int = 0
    reprefilled_tokens: int = 0
    """Tokens prefilled although they were sampled or prefilled before."""
    preemptions: int = 0
    running_slot_seconds: float = 0.0
    """Integral of running calls over the time in prefill and decode."""
    slot_seconds: float = 0.0

    def since(self, before: "FleetWork") -> "FleetWork":
        """Return the work after an earlier moment."""
        return FleetWork(**{name: getattr(self, name) - getattr(before, name) for name in self.__slots__})


class Fleet:
    """Generators by name, and the router over them.

    After every event the driver takes finished calls with ``take_finished``, and then plans with ``plan_events``.
    """

    def __init__(
        self,
        clock: EventClock,
        settings: FleetSettings,
        *,
        on_progress: Callable[[SimulatedTrajectory, int, int], None],
    ) -> None:
        """``on_progress`` takes a trajectory, the tokens of its call from its start on, and the version of them all."""
        self.settings = settings
        self._costs = settings.token_costs()
        self.generators: dict[str, SimulatedGenerator] = {}
        """By name; a generator that has ended is not among them."""
        self.finished: deque[tuple[SimulatedTrajectory, int]] = deque()
        """Calls that have finished since ``take_finished``, with their tokens."""
        self.has_changed = True
        """True if a generator has changed its service or its version; the driver resets it."""
        self._clock = clock
        self._on_progress = on_progress
        self._router = Candidates(settings.placement)
        self._moved: dict[SimulatedGenerator, None] = {}
        """Generators whose next event may have changed, in order."""
        self._newest: PolicyRecord | None = None
        self._required_version = 0
        self._loads = 0
        self._turns: dict[str, SimulatedGenerator] = {}
        """Generators that wait until others have loaded."""
        self._started = 0
        self._ended_work = FleetWork()

    def start(self, *, slow_factor: float = 1.0) -> SimulatedGenerator:
        """Start a generator without a policy; it loads the newest one."""
        name = f"generator-{self._started:05d}"
        self._started += 1
        sizes = self.settings
        engine = GeneratorClock(
            self._costs, slots=sizes.slots, cache_tokens=sizes.cache_tokens, slow_factor=slow_factor
        )
        engine.advance(self._clock.now)
        record = GeneratorRecord(
            instance_id=name,
            address=name,
            policy_version=-1,
            running_count=0,
            waiting_count=0,
            slot_count=sizes.slots,
            kv_token_capacity=sizes.cache_tokens,
            serving=False,
        )
        alarm = self._clock.alarm(lambda: self.advance(generator))
        generator = SimulatedGenerator(
            engine=engine, record=record, alarm=alarm, started_at=self._clock.now, slow_factor=slow_factor
        )
        self.generators[name] = generator
        self._router.put(generator.record)
        self._consider(generator)
        return generator

    def end(self, generator: SimulatedGenerator) -> list[SimulatedTrajectory]:
        """End a generator and its calls, which are returned; tokens that were not saved are lost."""
        self.advance(generator)
        calls = list(generator.calls.values())
        for trajectory in calls:
            self._leave(generator, trajectory)
        generator.has_ended = True
        generator.alarm.set(float("inf"))
        if generator.loading is not None:
            generator.loading = None
            self._end_load()
        self._ended_work = _added(self._ended_work, self._work_of(generator))
        del self.generators[generator.name]
        self._moved.pop(generator, None)
        self._router.remove(generator.name)
        return calls

    def advance(self, generator: SimulatedGenerator) -> None:
        """Move a generator to the present, and note which calls have finished or begun."""
        self._moved[generator] = None
        engine, now = generator.engine, self._clock.now
        if generator.has_ended or (engine.now >= now and engine.next_event() > now):
            return
        for call, _, tokens in engine.advance(now):
            generator.ended_call_tokens += tokens
            trajectory = generator.calls[call]
            self._leave(generator, trajectory)
            trajectory.finished_version = generator.version
            self.finished.append((trajectory, tokens))
        if generator.waiting:
            still = [each for each in generator.waiting if not self._has_begun(generator, each)]
            generator.waiting = still
        if self.settings.placement is Placement.TOKENS and generator.calls:
            tokens = engine.decoded_tokens - generator.ended_call_tokens
            self._router.grow(generator.name, tokens - generator.counted_tokens)
            generator.counted_tokens = tokens
        self._load_if_drained(generator)

    # -- calls -----------------------------------------------------------------------------------------------------
    def call(self, trajectory: SimulatedTrajectory) -> bool:
        """Start the next call of a trajectory; False while no generator may take it."""
        prompt = trajectory.work.prompt_id
        record = self._router.choose(VersionNeed(min_version=trajectory.floor), cached=(prompt,))
        if record is None:
            return False
        generator = self.generators[record.instance_id]
        self.advance(generator)
        sampled = trajectory.member.tokens
        context = trajectory.context
        waiting = generator.engine.waiting
        remaining = trajectory.tokens_of_call(generator.version)
        known = context - trajectory.new_context
        generator.engine.arrive(trajectory.call, context=context, remaining=remaining, known=known)
        generator.calls[trajectory.call] = trajectory
        trajectory.generator, trajectory.saved_in_call, trajectory.has_begun = generator, 0, sampled > 0
        trajectory.context_at_call = context
        if generator.engine.waiting > waiting:
            generator.waiting.append(trajectory)
        elif not sampled:
            self._begin(trajectory, generator)
        self._router.occupy(generator.name, context, (prompt,))
        return True

    def free_slots(self, floor: int) -> int:
        """Return the slots without a call on generators that serve this version or a newer one."""
        return self._router.free_slots(VersionNeed(min_version=floor))

    def save(self, trajectory: SimulatedTrajectory) -> None:
        """Report the tokens of a running call so far."""
        if (generator := trajectory.generator) is not None:
            self.advance(generator)
        if (generator := trajectory.generator) is not None:
            self._on_progress(trajectory, generator.engine.progress(trajectory.call), generator.version)

    def stop(self, trajectory: SimulatedTrajectory) -> int:
        """End the call of a trajectory; returns its tokens since the last report, which are lost unless saved."""
        if (generator := trajectory.generator) is None:
            return 0
        self.advance(generator)
        if trajectory.generator is None:  # It has just finished.
            return 0
        tokens = generator.engine.cancel(trajectory.call)
        generator.ended_call_tokens += tokens
        self._leave(generator, trajectory)
        self._load_if_drained(generator)
        return tokens - trajectory.saved_in_call

    def unsaved(self, trajectory: SimulatedTrajectory) -> int:
        """Return the tokens of a running call since its last save."""
        generator = trajectory.generator
        return 0 if generator is None else generator.engine.progress(trajectory.call) - trajectory.saved_in_call

    def take_finished(self) -> Collection[tuple[SimulatedTrajectory, int]]:
        """Return the calls that have finished since the last time, with their tokens."""
        if not self.finished:
            return ()
        finished, self.finished = self.finished, deque()
        return finished

    def plan_events(self) -> None:
        """Set the alarms of the generators whose next event may have changed: once per event, not at every change."""
        for generator in self._moved:
            generator.alarm.set(generator.engine.next_event())
        self._moved.clear()

    # -- policies --------------------------------------------------------------------------------------------------
    def announce(self, record: PolicyRecord) -> None:
        """Tell the generators about the newest policy."""
        self._newest = record
        for generator in self.generators.values():
            self._consider(generator)

    def require(self, version: int) -> None:
        """Require a version of every generator: an older one can take no call."""
        if version > self._required_version:
            self._required_version = version
            for generator in self.generators.values():
                self._consider(generator)

    def serves(self, version: int) -> bool:
        """Tell whether a generator serves this version or a newer one."""
        return self._router.choose(VersionNeed(min_version=version)) is not None

    def pause(self, seconds: float) -> None:
        """Stop all generators, because the trainer has their devices; their caches stay."""
        for generator in self.generators.values():
            self.advance(generator)
            generator.engine.reload(seconds, mode="keep_kv")
            generator.paused_call_seconds += generator.engine.running * seconds
            self._moved[generator] = None

    def slow_down(self, factor: float) -> None:
        """Multiply the seconds of all generators by this factor from now on."""
        for generator in self.generators.values():
            self.advance(generator)
            generator.engine.slow_down(factor * generator.slow_factor)

    # -- figures ---------------------------------------------------------------------------------------------------
    def engine_load(self) -> EngineLoad | None:
        """Return the sums over the generators that serve, as their heartbeats give them; None without one."""
        serving = [generator for generator in self.generators.values() if generator.record.serving]
        for generator in serving:
            self.advance(generator)
        if not serving:
            return None
        engines = [generator.engine for generator in serving]
        return EngineLoad(
            slots=self.settings.slots * len(engines),
            waiting=sum(engine.waiting for engine in engines),
            kv_token_capacity=self.settings.cache_tokens * len(engines),
            preemptions=sum(engine.preemption_total for engine in engines),
        )

    def work(self) -> FleetWork:
        """Return the work of all generators so far."""
        work = self._ended_work
        for generator in self.generators.values():
            self.advance(generator)
            work = _added(work, self._work_of(generator))
        return work

    def _work_of(self, generator: SimulatedGenerator) -> FleetWork:
        engine = generator.engine
        return FleetWork(
            decoded_tokens=engine.decoded_tokens,
            prefilled_tokens=engine.prefilled_tokens,
            reprefilled_tokens=engine.reprefilled_tokens,
            preemptions=engine.preemption_total,
            running_slot_seconds=engine.call_seconds - generator.paused_call_seconds,
            slot_seconds=self.settings.slots * (self._clock.now - generator.started_at),
        )

    # -- events ----------------------------------------------------------------------------------------------------
    def _has_begun(self, generator: SimulatedGenerator, trajectory: SimulatedTrajectory) -> bool:
        if trajectory.call not in generator.calls:
            return True
        begun = generator.engine.progress(trajectory.call) > 0
        if begun and not trajectory.has_begun:
            self._begin(trajectory, generator)
        return begun

    def _begin(self, trajectory: SimulatedTrajectory, generator: SimulatedGenerator) -> None:
        trajectory.has_begun = True
        self._on_progress(trajectory, 0, generator.version)

    def _leave(self, generator: SimulatedGenerator, trajectory: SimulatedTrajectory) -> None:
        del generator.calls[trajectory.call]
        trajectory.generator = None
        # The router counted the context at the start of the call; later tokens are counted by generator.
        self._router.leave(generator.name, trajectory.context_at_call)
        if not generator.calls:
            generator.counted_tokens = 0

    # -- loads -----------------------------------------------------------------------------------------------------
    def _consider(self, generator: SimulatedGenerator) -> None:
        if generator.loading is not None or generator.has_ended:
            return
        rules = self.settings.rules
        choice = next_policy(generator.serving, self._newest, None, rules, required_version=self._required_version)
        if choice is None:
            return
        if rules.at_once is not None and self._loads >= rules.at_once and not choice.urgent:
            self._turns[generator.name] = generator
            return
        self._loads += 1
        generator.loading = choice.record
        self._clock.call_at(self._clock.now + self.settings.fetch_seconds, partial(self._fetched, generator))

    def _fetched(self, generator: SimulatedGenerator) -> None:
        if generator.has_ended:
            return
        self.advance(generator)
        if self.settings.on_new_version == "drain" and generator.calls:
            generator.is_draining = True
            self._register(generator)
        else:
            self._load(generator)

    def _load_if_drained(self, generator: SimulatedGenerator) -> None:
        if generator.is_draining and not generator.calls:
            self._load(generator)

    def _load(self, generator: SimulatedGenerator) -> None:
        """Swap the weights: a segment of every running call ends; after a drain there is none."""
        seconds, mode, version = self.settings.swap_seconds, self.settings.on_new_version, generator.version
        for call, tokens in generator.engine.reload(seconds, mode="keep_kv" if mode == "drain" else mode).items():
            if tokens:
                self._on_progress(generator.calls[call], tokens, version)
        generator.paused_call_seconds += generator.engine.running * seconds
        generator.serving, generator.loading, generator.is_draining = generator.loading, None, False
        self._register(generator)
        self._moved[generator] = None
        self._end_load()
        self._consider(generator)

    def _register(self, generator: SimulatedGenerator) -> None:
        generator.register()
        self._router.put(generator.record)
        self.has_changed = True

    def _end_load(self) -> None:
        self._loads -= 1
        waiting, self._turns = self._turns, {}
        for generator in waiting.values():
            self._consider(generator)


def _added(one: FleetWork, other: FleetWork) -> FleetWork:
    return replace(one, **{name: getattr(one, name) + getattr(other, name) for name in FleetWork.__slots__})
