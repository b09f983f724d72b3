"""The step clock of a generator beside an engine that steps token by token, and alarms in order of time."""

import numpy as np
import pytest

from rollmesh.errors import ConfigError
from rollmesh.sim.decode_curve import EngineCosts
from rollmesh.sim.event_clock import EventClock
from rollmesh.sim.generator_clock import Finished, GeneratorClock, OnLoad

from .stepping_engine import SteppingEngine

TICK = 2.0**-12
"""All seconds of these tests are multiples of a power of two, so that both engines compute without rounding."""
MODES: tuple[OnLoad, ...] = ("interrupt", "keep_kv")


def costs(slots: int = 8, *, base: float = 1.0, slope: float = 0.0, prefill: float = 0.0) -> EngineCosts:
    return EngineCosts(base=(base,) * (slots + 1), slope=(slope,) * (slots + 1), prefill_seconds_per_token=prefill)


def random_costs(rng: np.random.Generator, slots: int) -> EngineCosts:
    base = np.sort(rng.integers(20, 400, slots + 1)) * TICK
    slope = rng.integers(0, 3, slots + 1) * TICK
    prefill = float(rng.integers(0, 5)) * TICK
    return EngineCosts(base=tuple(base.tolist()), slope=tuple(slope.tolist()), prefill_seconds_per_token=prefill)


def clock(engine_costs: EngineCosts, *, slots: int = 8, cache_tokens: int = 1000, slow: float = 1.0) -> GeneratorClock:
    return GeneratorClock(engine_costs, slots=slots, cache_tokens=cache_tokens, slow_factor=slow)


@pytest.mark.parametrize("seed", range(200))
def test_random_cases_agree_with_an_engine_that_steps_token_by_token(seed: int) -> None:
    """Every finish, every token count at every change, every counter: equal, not only close."""
    rng = np.random.default_rng((13, seed))
    slots, cache_tokens = int(rng.integers(1, 8)), int(rng.integers(40, 300))
    slow = float(rng.choice([1.0, 1.5]))
    engine_costs = random_costs(rng, slots)
    ours = clock(engine_costs, slots=slots, cache_tokens=cache_tokens, slow=slow)
    stepped = SteppingEngine(engine_costs, slots, cache_tokens, slow)
    now, number = 0.0, 0
    for _ in range(60):
        # Half of the changes come at a finish or a full cache, as in a mesh that refills its pool.
        ahead = now + float(rng.integers(1, 3000)) * TICK
        now = min(ahead, ours.next_event()) if rng.random() < 0.5 else ahead
        assert ours.advance(now) == stepped.advance(now)
        present = ours.calls()
        assert [ours.progress(call) for call in present] == [stepped.find(call).tokens for call in present]
        choice = rng.random()
        if choice < 0.6:
            context = int(rng.integers(1, 20))
            remaining = int(rng.integers(1, min(60, cache_tokens - context)))
            for engine in (ours, stepped):
                engine.arrive(number, context=context, remaining=remaining, known=context // 2)
            number += 1
        elif choice < 0.75 and present:
            cancelled = int(rng.choice(present))
            assert ours.cancel(cancelled) == stepped.cancel(cancelled)
        elif choice < 0.9:
            seconds, mode = float(rng.integers(0, 500)) * TICK, MODES[int(rng.integers(0, 2))]
            assert ours.reload(seconds, mode=mode) == stepped.reload(seconds, mode=mode)
        assert (ours.running, ours.waiting) == (len(stepped.running), len(stepped.waiting))
        assert ours.context_tokens == sum(call.size for call in stepped.running)
        assert ours.decoded_tokens == stepped.decoded_tokens
    assert ours.advance(1e6) == stepped.advance(1e6)
    assert ours.calls() == []
    assert ours.preemption_total == stepped.preemption_total
    assert (ours.prefilled_tokens, ours.reprefilled_tokens) == (stepped.prefilled_tokens, stepped.reprefilled_tokens)


def test_a_full_cache_preempts_the_youngest_call_which_pays_its_prefill_again() -> None:
    """Cache of 20: two calls of 8 fit for 2 steps; the younger comes back when the older has finished, at 4 s."""
    generator = clock(costs(prefill=0.125), cache_tokens=20)
    generator.arrive(1, context=8, remaining=4)
    generator.arrive(2, context=8, remaining=4)
    assert generator.next_event() == 4.0  # 2 s of prefills, 2 steps, then the cache is full
    assert generator.advance(4.0) == []
    assert (generator.running, generator.waiting, generator.preemption_total) == (1, 1, 1)
    assert generator.progress(2) == 2
    assert generator.advance(6.0) == [Finished(1, 6.0, 4)]
    assert generator.reprefilled_tokens == 10
    assert generator.advance(100.0) == [Finished(2, 6.0 + 10 * 0.125 + 2.0, 4)]
    assert (generator.prefilled_tokens, generator.decoded_tokens) == (26, 8)


def test_a_call_that_the_cache_cannot_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cache_tokens=10"):
        clock(costs(), cache_tokens=10).arrive(1, context=5, remaining=6)


def test_a_slower_node_ends_its_step_and_takes_longer_for_the_next_ones() -> None:
    """Ten steps of 1 s: the one in progress at 3.5 s ends at 4 s, and six steps of 2 s follow; then faster again."""
    node = clock(costs())
    node.arrive(0, context=1, remaining=10)
    node.advance(3.5)
    node.slow_down(2.0)
    assert (node.next_event(), node.progress(0)) == (16.0, 3)
    node.advance(8.0)
    node.slow_down(0.5)
    assert node.advance(10.0) == [Finished(0, 10.0, 10)]


def test_alarms_ring_in_order_of_time_and_of_setting():
    clock, rung = EventClock(), []
    for name, time in (("late", 2.0), ("first", 1.0), ("second", 1.0)):
        clock.call_at(time, lambda name=name: rung.append((clock.now, name)))
    while clock.step():
        pass
    assert rung == [(1.0, "first"), (1.0, "second"), (2.0, "late")]


def test_a_moved_alarm_rings_once_at_its_new_time():
    clock, rung = EventClock(), []
    alarm = clock.alarm(lambda: rung.append(clock.now))
    for time in (5.0, 3.0, 4.0):
        alarm.set(time)
    while clock.step():
        pass
    assert rung == [4.0]


def test_a_time_in_the_past_rings_now():
    clock, rung = EventClock(), []
    clock.call_at(7.0, lambda: clock.call_at(1.0, lambda: rung.append(clock.now)))
    while clock.step():
        pass
    assert rung == [7.0]
