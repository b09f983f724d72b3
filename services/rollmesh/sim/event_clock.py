"""Virtual time: a heap of alarms, each with one pending time that may be moved."""

import heapq
import math
from collections.abc import Callable

from rollmesh.errors import ConfigError

MOST_EVENTS = 10**8
"""Events after which a simulation ends with an error, unless the user asked for a long one."""


class Alarm:
    """An action at one virtual time; a new time replaces the old one."""

    __slots__ = ("_clock", "action", "time")

    def __init__(self, clock: "EventClock", action: Callable[[], None]) -> None:
        self._clock = clock
        self.action = action
        self.time = math.inf
        """Virtual seconds; infinite while nothing is pending."""

    def set(self, time: float) -> None:
        """Move the alarm to a virtual time, not before the present; infinity switches it off."""
        if time != self.time:
            self.time = max(time, self._clock.now)
            if time < math.inf:
                self._clock.push(self)


class EventClock:
    """Alarms in order of time; those of one time in the order in which they were set."""

    def __init__(self, *, most_events: int = MOST_EVENTS) -> None:
        self.now = 0.0
        """Virtual seconds since the start."""
        self.event_count = 0
        self._most_events = most_events
        self._heap: list[tuple[float, int, Alarm]] = []
        self._pushed = 0

    def alarm(self, action: Callable[[], None]) -> Alarm:
        """Return an alarm that is switched off."""
        return Alarm(self, action)

    def call_at(self, time: float, action: Callable[[], None]) -> None:
        """Call the action once at a virtual time."""
        Alarm(self, action).set(time)

    def push(self, alarm: Alarm) -> None:
        """Queue an alarm at its time; called by ``Alarm.set``."""
        self._pushed += 1
        heapq.heappush(self._heap, (alarm.time, self._pushed, alarm))

    def step(self) -> bool:
        """Move to the next alarm and call its action; returns False when no alarm is pending.

        Raises ConfigError after the most events.
        """
        while self._heap:
            time, _, alarm = heapq.heappop(self._heap)
            if alarm.time != time:
                continue  # It was moved.
            self.event_count += 1
            if self.event_count > self._most_events:
                raise ConfigError(
                    f"the simulation has taken more than {self._most_events} events by {time:.0f} virtual seconds: "
                    "simulate fewer train steps (trainer.train_steps), or allow it with --long"
                )
            self.now = time
            alarm.time = math.inf
            alarm.action()
            return True
        return False
