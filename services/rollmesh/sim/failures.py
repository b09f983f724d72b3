"""Failures of a simulated mesh: which they are, and when each strikes."""

from collections.abc import Callable
from functools import partial
from typing import Annotated

import numpy as np
from pydantic import Field

from rollmesh.config.section import Section
from rollmesh.sim.event_clock import EventClock
from rollmesh.sim.fleet import Fleet
from rollmesh.sim.simulated_leader import SimulatedLeader
from rollmesh.sim.simulated_trainer import SimulatedTrainer
from rollmesh.sim.simulated_worker import SimulatedWorker

_STREAMS = {"death": 10, "spot": 11, "trainer_crash": 12, "leader_gap": 13}
Rate = Annotated[float, Field(ge=0, le=3600)]
"""Events per hour, at most one per second: a mesh that fails more often makes no progress."""


class FailurePlan(Section):
    """Rates, times and sizes; the default is a mesh without failures. Times are virtual seconds."""

    deaths_per_hour: Rate = 0.0
    """Deaths of each generator; a call loses at most rollout.partial_save_tokens."""
    spot_reclaims_per_hour: Rate = 0.0
    """Reclaims of each generator with a grace time that is long enough to hand over its calls: no token is lost."""
    back_seconds: float = Field(default=60.0, ge=0)
    """Time until another generator takes the place of one that ended, and until a crashed trainer works again."""
    late_generators: int = Field(default=0, ge=0)
    """Generators that join late."""
    late_seconds: float = Field(default=600.0, ge=0)
    slow_generators: int = Field(default=0, ge=0)
    slow_factor: float = Field(default=2.0, gt=0)
    """Factor on the seconds of a slow generator's steps and prefills."""
    trainer_crashes_per_hour: Rate = 0.0
    """Crashes of the trainer; it begins its phase again, or claims no batch until it is back."""
    trainer_lost_seconds: float = Field(default=0.0, ge=0)
    """Earlier train steps that it computes again, because their state was not saved."""
    leader_gaps_per_hour: Rate = 0.0
    """Deaths of the leader; the next one leads after store.session_ttl_seconds."""


class Failures:
    """Failures of one run; the times of one kind do not depend on the other kinds."""

    def __init__(
        self,
        clock: EventClock,
        plan: FailurePlan,
        *,
        seed: int,
        fleet: Fleet,
        worker: SimulatedWorker,
        leader: SimulatedLeader,
        trainer: SimulatedTrainer,
        partial_save_tokens: int,
        leader_ttl_seconds: float,
    ) -> None:
        self._clock = clock
        self._plan = plan
        self._fleet = fleet
        self._worker = worker
        self._leader = leader
        self._trainer = trainer
        self._partial_save_tokens = partial_save_tokens
        self._leader_ttl_seconds = leader_ttl_seconds
        self._numbers = {
            kind: np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, stream, 0]))
            for kind, stream in _STREAMS.items()
        }

    def begin(self, generators: int) -> None:
        """Start the generators and plan the first failures."""
        plan = self._plan
        late = min(generators, plan.late_generators)
        for index in range(generators):
            start = partial(self._start, plan.slow_factor if index < plan.slow_generators else 1.0)
            if index < generators - late:
                start()
            else:
                self._clock.call_at(plan.late_seconds, start)
        # The tokens after the last chunk of each call of a dead generator never arrive.
        kill = partial(self._lose, "death", self._partial_save_tokens, "generator_death")
        crash = partial(self._trainer.crash, back_after=plan.back_seconds, lost_seconds=plan.trainer_lost_seconds)
        self._repeat("death", plan.deaths_per_hour * generators, kill)
        self._repeat("spot", plan.spot_reclaims_per_hour * generators, partial(self._lose, "spot", 1, "spot_reclaim"))
        self._repeat("trainer_crash", plan.trainer_crashes_per_hour, crash)
        self._repeat("leader_gap", plan.leader_gaps_per_hour, partial(self._leader.fail, self._leader_ttl_seconds))

    def _start(self, slow_factor: float) -> None:
        self._fleet.start(slow_factor=slow_factor)

    def _repeat(self, kind: str, per_hour: float, strike: Callable[[], None]) -> None:
        if not per_hour:
            return

        def next_time() -> float:
            return self._clock.now + float(self._numbers[kind].exponential(3600 / per_hour))

        def struck() -> None:
            strike()
            self._clock.call_at(next_time(), struck)

        self._clock.call_at(next_time(), struck)

    def _lose(self, kind: str, unsaved_tokens: int, reason: str) -> None:
        """End a random generator, if there is one; another takes its place."""
        alive = list(self._fleet.generators.values())
        if not alive:
            return
        generator = alive[int(self._numbers[kind].integers(len(alive)))]
        self._worker.lose_generator(generator, unsaved_tokens=unsaved_tokens, reason=reason)
        start = partial(self._start, generator.slow_factor)
        self._clock.call_at(self._clock.now + self._plan.back_seconds, start)
        self._leader.look_soon()
