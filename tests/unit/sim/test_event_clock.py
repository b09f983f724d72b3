"""Alarms in order of time."""

from rollmesh.sim.event_clock import EventClock


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
