"""Trainer of a simulated mesh: one batch after the other, then its policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from rollmesh.sim.event_clock import EventClock
from rollmesh.sim.fleet import Fleet
from rollmesh.sim.queue_model import GroupState, ModelGroup, QueueModel
from rollmesh.sim.trainer_model import PartsAhead, TrainerModel
from rollmesh.sim.update_record import UpdateRecord, update_record


class SimulatedTrainer:
    """The trainer. It reports a trained batch first, then publishes its policy.

    The last part of a publication (``TrainerModel.background_seconds``) is in flight while the next batch is claimed
    and trained; that batch is reported once the policy is announced.
    """

    def __init__(
        self,
        clock: EventClock,
        queue: QueueModel,
        model: TrainerModel,
        fleet: Fleet,
        *,
        part_groups: int,
        on_trained: Callable[[], None],
        on_policy: Callable[[int, int], None],
    ) -> None:
        """``on_policy(version, train_step)`` is called at every announcement."""
        self.updates: list[UpdateRecord] = []
        self._clock = clock
        self._queue = queue
        self._model = model
        self._fleet = fleet
        self._part_groups = part_groups
        self._parts = PartsAhead(model, clock.now) if part_groups else None
        self._in_parts: set[str] = set()
        """Groups of the next batch whose gradient is computed or queued."""
        self._on_trained = on_trained
        self._on_policy = on_policy
        self._done = clock.alarm(self._phase_done)
        self._announcement = clock.alarm(self._announce)
        """The publication in flight."""
        self._claimed_at = self._phase_began = clock.now
        self._free_since = clock.now
        self._is_publishing = False
        self._training = 0
        """Train step of the claimed batch; 0 without one."""
        self._awaits_announcement = False
        """True if that batch is trained, and the policy before it is in flight."""
        self._slowing = 1.0
        self._absent_until = 0.0
        """Time until which it is not back from a crash that hit it between two phases."""
        self._back = clock.alarm(lambda: None)
        """Event at that time, after which ``react`` is called."""

    @property
    def is_working(self) -> bool:
        """True while it trains or publishes, and neither waits nor has its publication in flight."""
        return bool((self._training and not self._awaits_announcement) or self._is_publishing)

    def slow_down(self, factor: float) -> None:
        """Multiply the seconds of training and publication by this factor from now on."""
        now = self._clock.now
        for alarm in (self._done, self._announcement):
            if now < alarm.time < math.inf:
                alarm.set(now + (alarm.time - now) * factor / self._slowing)
        self._slowing = factor

    def react(self) -> None:
        """Compute parts of the next batch, and claim the batch that is cut if nothing else is to be done."""
        queue, now = self._queue, self._clock.now
        if now < self._absent_until:
            return
        if self._parts is not None and not queue.batch:
            self._compute_parts(self._parts)
        if self._training or self._is_publishing or not queue.batch:
            return
        self._claimed_at = self._phase_began = now
        self._training = queue.cut_step
        groups = queue.claim()
        tokens = _tokens(groups)
        if self._parts is None:
            ends = now + self._slowing * self._model.train_seconds(tokens=tokens)
        else:
            ends = self._parts.cut(now, tokens=tokens)
            self._in_parts.clear()
        self._done.set(ends)
        if self._model.colocated:
            self._fleet.pause(ends + self._model.publish_seconds() - now)

    def _compute_parts(self, parts: PartsAhead) -> None:
        ready = self._queue.groups[GroupState.READY]
        while len(ready) - len(self._in_parts) >= self._part_groups:
            part = [group for group in ready.values() if group.group_id not in self._in_parts][: self._part_groups]
            parts.add(self._clock.now, _tokens(part))
            self._in_parts.update(group.group_id for group in part)

    def crash(self, *, back_after: float, lost_seconds: float) -> None:
        """Lose the phase in progress; it begins again ``back_after`` + ``lost_seconds`` from now.

        Between two phases it claims no batch before that time. A crash before that time only moves it. A publication in
        flight and the parts of the next batch begin again too. The devices of a colocated trainer stay with it.
        """
        again = self._clock.now + back_after + lost_seconds
        if self._announcement.time < math.inf:
            self._announcement.set(again + self._slowing * self._model.background_seconds)
        if self._parts is not None:
            self._parts = PartsAhead(self._model, again)
            self._in_parts.clear()
        if not self.is_working:
            self._absent_until = again
            self._back.set(again)
            return
        done, length = self._done.time, self._done.time - self._phase_began
        self._phase_began = again
        self._done.set(again + length)
        if self._model.colocated:
            self._fleet.pause(self._done.time - done)

    def _phase_done(self) -> None:
        self._queue.now = self._clock.now
        if self._training:
            self._awaits_announcement = self._announcement.time < math.inf
            if not self._awaits_announcement:
                self._trained()
            return
        self._is_publishing = False
        self._free_since = self._clock.now
        if self._model.background_seconds:
            self._announcement.set(self._clock.now + self._slowing * self._model.background_seconds)
        else:
            self._announce()

    def _trained(self) -> None:
        queue, step, limits = self._queue, self._training, self._queue.limits
        self.updates.append(
            update_record(
                step,
                queue.claim(),
                queue.version_steps,
                cut_at=self._claimed_at,
                trained_at=self._clock.now,
                trainer_wait_seconds=self._claimed_at - self._free_since,
                masked_from=limits.max_staleness + 1 if limits.mask_old_segments else None,
            )
        )
        queue.confirm_batch_file()
        queue.report_trained()
        self._training, self._is_publishing, self._phase_began = 0, True, self._clock.now
        stall = self._model.publish_seconds() - self._model.background_seconds
        self._done.set(self._clock.now + self._slowing * stall)
        self._on_trained()

    def _announce(self) -> None:
        self._queue.now = self._clock.now
        self._announcement.set(math.inf)
        step = self._queue.trained_step
        self._on_policy(self._queue.announce(step), step)
        if self._awaits_announcement:
            self._awaits_announcement = False
            self._trained()


def _tokens(groups: Iterable[ModelGroup]) -> int:
    return sum(group.scored_tokens - group.cut_tokens for group in groups)
