"""Trainer of a simulated mesh: its seconds, its train steps, and one batch after the other with its policy."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rollmesh.errors import ConfigError
from rollmesh.sim.event_clock import EventClock
from rollmesh.sim.fleet import Fleet
from rollmesh.sim.queue_model import GroupState, ModelGroup, QueueModel
from rollmesh.types import TrajectoryState


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerModel:
    """Durations of train steps, linear in tokens.

    A step takes the fixed seconds, the evidence passes (log-probabilities without a gradient) and the gradient of the
    batch. With ``colocated`` the trainer has the devices of the generators: they stop from the claim of a batch to the
    announcement of its policy, and the devices are switched twice.
    """

    fixed_seconds: float
    """Seconds of a step that no token adds to: batch file, optimizer, trainer state."""
    seconds_per_token: float
    """Forward, backward: seconds per token of the batch."""
    evidence_passes: int = 0
    """Passes that compute log-probabilities only: at the start of the step, with older weights, with the reference."""
    evidence_seconds_per_token: float = 0.0
    """Seconds per token of one such pass."""
    publication_seconds: float = 0.0
    """Seconds from new weights to the announcement of their policy."""
    background_seconds: float = 0.0
    """The last of ``publication_seconds``: the next step trains meanwhile, and is reported after the announcement."""
    colocated: bool = False
    switch_seconds: float = 0.0
    """Colocated only: seconds to hand the devices from generators to trainer, and again to hand them back."""

    def train_seconds(self, *, tokens: int, ahead_tokens: int = 0) -> float:
        """Return the seconds from the claim of a batch to new weights.

        ``ahead_tokens`` of the batch have their gradient and evidence already.
        """
        return self.fixed_seconds + self.part_seconds(tokens - ahead_tokens) + self.switch_seconds

    def part_seconds(self, tokens: int) -> float:
        """Return the seconds of evidence and gradient of a part of a batch."""
        return tokens * (self.seconds_per_token + self.evidence_passes * self.evidence_seconds_per_token)

    def publish_seconds(self) -> float:
        """Return the seconds from new weights until generators may load their policy."""
        return self.publication_seconds + self.switch_seconds


class PartsAhead:
    """Gradients that a trainer computes for ready groups while it waits for the cut of their batch.

    One part after the other, in the order of ``add``. A cut waits for the part in progress.
    """

    def __init__(self, model: TrainerModel, now: float) -> None:
        """Raise ConfigError for a colocated trainer: while it waits, generators have the devices."""
        if model.colocated:
            raise ConfigError("parts ahead of a cut need a trainer with devices of its own; it is colocated")
        self._model = model
        self._free_at = now
        self._parts: list[tuple[float, float, int]] = []
        """(start, end, tokens) of each part, in order."""

    def add(self, now: float, tokens: int) -> float:
        """Queue a part whose groups are ready; return the time at which it is computed, unless the cut comes first."""
        start = max(self._free_at, now)
        self._free_at = start + self._model.part_seconds(tokens)
        self._parts.append((start, self._free_at, tokens))
        return self._free_at

    def cut(self, now: float, *, tokens: int) -> float:
        """Return the time of the new weights of a batch that is cut now and contains all parts; begin the next batch.

        Parts that have not begun are computed with the rest of the batch.
        """
        begun = [(end, size) for start, end, size in self._parts if start < now]
        began = max([now, *(end for end, _ in begun)])
        ahead = sum(size for _, size in begun)
        self._parts.clear()
        self._free_at = began + self._model.train_seconds(tokens=tokens, ahead_tokens=ahead)
        return self._free_at


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRecord:
    """One train step."""

    train_step: int
    cut_at: float
    """Virtual seconds, as all times."""
    trained_at: float
    trainer_wait_seconds: float
    """Time for which the trainer had no batch before this one."""
    trajectories: int
    tokens_by_staleness: Mapping[int, int]
    """Tokens in the loss by the train steps between their policy and the trainer."""
    masked_tokens: int
    """Tokens of scored trajectories that are too old for the loss."""
    trajectories_by_staleness: Mapping[int, int]
    """By the staleness of the oldest token in the loss, if there is one."""
    version_spans: int
    """Sum over the trajectories of newest minus oldest policy version."""

    @property
    def tokens(self) -> int:
        """Tokens trained on."""
        return sum(self.tokens_by_staleness.values())


def update_record(
    train_step: int,
    groups: Iterable[ModelGroup],
    version_steps: Sequence[int],
    *,
    cut_at: float,
    trained_at: float,
    trainer_wait_seconds: float,
    masked_from: int | None = None,
) -> UpdateRecord:
    """Count the tokens of a claimed batch; its members must not be deleted yet.

    Tokens of a staleness from ``masked_from`` on are out of the loss; None masks none.
    """
    tokens: Counter[int] = Counter()
    oldest: Counter[int] = Counter()
    trajectories = spans = masked = 0
    for group in groups:
        for member in group.members:
            if member.state is not TrajectoryState.SCORED:
                continue
            trajectories += 1
            saves = member.kept_saves
            in_loss = []
            for save in saves:
                age = train_step - 1 - version_steps[save.policy_version]
                if masked_from is not None and age >= masked_from:
                    masked += save.token_count
                else:
                    tokens[age] += save.token_count
                    in_loss.append(age)
            if in_loss:
                oldest[in_loss[0]] += 1
            spans += saves[-1].policy_version - saves[0].policy_version
    return UpdateRecord(
        train_step=train_step,
        cut_at=cut_at,
        trained_at=trained_at,
        trainer_wait_seconds=trainer_wait_seconds,
        trajectories=trajectories,
        tokens_by_staleness=dict(sorted(tokens.items())),
        masked_tokens=masked,
        trajectories_by_staleness=dict(sorted(oldest.items())),
        version_spans=spans,
    )


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
