"""Mesh on a virtual clock: the scheduler, the router, the reload rules and the queue model, driven by models."""

import gc
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from rollmesh.curriculum.planners import RoundRules
from rollmesh.curriculum.samplers import PromptSampler
from rollmesh.errors import ConfigError
from rollmesh.mesh import RunLimits
from rollmesh.scheduling import Schedule
from rollmesh.sim.cores import CoreShares, SimulatedCores
from rollmesh.sim.event_clock import MOST_EVENTS, EventClock
from rollmesh.sim.failures import FailurePlan, Failures
from rollmesh.sim.fleet import Fleet, FleetSettings, FleetWork
from rollmesh.sim.invariants import Invariants
from rollmesh.sim.prompts import SimulatedDraws, SimulatedPrompts
from rollmesh.sim.queue_model import QueueModel
from rollmesh.sim.reward_model import RewardModel, RewardWorkers
from rollmesh.sim.run_timeline import RunTimeline
from rollmesh.sim.simulated_leader import SimulatedLeader
from rollmesh.sim.simulated_trainer import SimulatedTrainer, TrainerModel, UpdateRecord
from rollmesh.sim.simulated_worker import SimulatedWorker
from rollmesh.types import PolicyRecord

_LONGEST_WAIT_SECONDS = 30 * 86400.0
"""Virtual time without a train step after which a run counts as stuck."""
_LONGEST_PAUSE_SECONDS = 86400.0
"""Time between two looks for a train step, a finished trajectory, a score, or at least a decoded token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSettings:
    """Everything that a simulation depends on."""

    schedule: Schedule
    limits: RunLimits
    fleet: FleetSettings
    prompts: SimulatedPrompts
    trainer: TrainerModel
    rewards: RewardModel
    partial_save_tokens: int
    devices: int
    """Devices of generators and trainer."""
    failures: FailurePlan
    failure_seed: int = 0
    """Seed of the times of failures."""
    rounds: RoundRules | None = None
    """Planner and group shaper; None for groups of one round."""
    cores: CoreShares | None = None
    """Cores that the mesh shares on one machine; None for generators and a trainer that never slow each other."""
    most_events: int = MOST_EVENTS
    sampler: PromptSampler | None = None
    """Choice of the prompts; None for their order."""
    seed: int = 0
    """Seed of the draws."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """A finished simulation."""

    updates: tuple[UpdateRecord, ...]
    work: tuple[FleetWork, ...]
    """Work of the generators up to the end of each update."""
    seconds: float
    """Virtual seconds to the end of the last update."""
    wasted_tokens: Mapping[str, int]
    """Sampled tokens that are never trained on, by reason."""
    in_flight_tokens: int
    """Sampled tokens of trajectories that remain when the last batch is trained."""
    event_count: int
    finished: int
    """Finished trajectories."""
    rests_while_training: bool
    """True if the schedule samples no token between a cut and the policy that is trained on it."""


class SimulatedMesh:
    """One run of a simulated mesh."""

    def __init__(self, settings: MeshSettings, *, check: bool = False, timeline: RunTimeline | None = None) -> None:
        """``check`` switches the invariants on; ``timeline`` takes samples for the page."""
        self._timeline = timeline
        self.clock = EventClock(most_events=settings.most_events)
        self.queue = QueueModel(settings.limits)
        self.invariants = Invariants(settings.schedule, self.queue) if check else None
        self.fleet = Fleet(
            self.clock,
            settings.fleet,
            on_progress=lambda trajectory, tokens, version: self.worker.progress(trajectory, tokens, version),
        )
        self._settings = settings
        self._work: list[FleetWork] = []
        self._progress_made = (0, 0, 0)
        self._decoded_tokens: int | None = None
        """Decoded tokens at the last look, if it found nothing else."""
        self._look_at = _LONGEST_PAUSE_SECONDS
        self.worker = SimulatedWorker(
            self.clock,
            self.queue,
            self.fleet,
            segment_tokens=settings.schedule.segment_tokens,
            reward_time=RewardWorkers(settings.rewards).known_at,
            invariants=self.invariants,
        )
        sampler = settings.sampler
        draws = SimulatedDraws(settings.prompts, sampler, self.queue, settings.seed) if sampler else None
        self.leader = SimulatedLeader(
            self.clock,
            self.queue,
            settings.schedule,
            settings.prompts,
            self.worker,
            self.fleet,
            rounds=settings.rounds,
            draws=draws,
            invariants=self.invariants,
        )
        self.trainer = SimulatedTrainer(
            self.clock,
            self.queue,
            settings.trainer,
            self.fleet,
            part_groups=settings.schedule.part_groups,
            on_trained=self._trained,
            on_policy=self._announced,
        )
        self._cores = SimulatedCores(settings.cores, self.fleet, self.trainer) if settings.cores else None
        self._failures = Failures(
            self.clock,
            settings.failures,
            seed=settings.failure_seed,
            fleet=self.fleet,
            worker=self.worker,
            leader=self.leader,
            trainer=self.trainer,
            partial_save_tokens=settings.partial_save_tokens,
            leader_ttl_seconds=settings.limits.session_ttl_seconds,
        )

    def run(self) -> SimulatedRun:
        """Run until the last batch is trained.

        Raises ConfigError if that never happens, with what the mesh waits for.
        """
        self._announced(self.queue.announce(0), 0)
        self._failures.begin(self._settings.fleet.count)
        self.leader.look_soon()
        # Garbage collection would scan all trajectories in flight again and again, and they form no circles: a group
        # that leaves the queue drops its members, so reference counts free both.
        collects = gc.isenabled()
        gc.disable()
        try:
            self._step_until_trained()
        finally:
            if collects:
                gc.enable()
        return self._result()

    def _step_until_trained(self) -> None:
        clock, queue, worker, trainer = self.clock, self.queue, self.worker, self.trainer
        train_steps = self._settings.schedule.train_steps
        while queue.trained_step < train_steps:
            if not clock.step():
                raise ConfigError(self._stuck())
            if worker.react():
                self.leader.look_soon()
            trainer.react()
            # Calls that end at this very moment are finished by a second reaction, which also plans the new times.
            if self._cores is not None and self._cores.react() and worker.react():
                self.leader.look_soon()
            if self._timeline is not None:
                self._timeline.observe(clock.now, self.fleet.generators)
            if clock.now > self._look_at and self._is_stuck():
                raise ConfigError(self._stuck())

    def _announced(self, version: int, train_step: int) -> None:
        record = PolicyRecord(policy_version=version, train_step=train_step, path="", manifest_digest="")
        self.fleet.announce(record)
        self.leader.look_soon()

    def _trained(self) -> None:
        self._work.append(self.fleet.work())
        for group_id in self.queue.ended:
            self.worker.works.pop(group_id, None)
        if self.invariants is None:
            self.queue.ended.clear()
        self.leader.look_soon()

    def _is_stuck(self) -> bool:
        """Tell whether nothing happened since the last two looks, and set the time of the next one.

        Long decodes, tools and scores end by themselves; a trainer that crashes endlessly works without an end.
        """
        totals, updates = self.queue.totals, self.trainer.updates
        made = (totals["finished_total"], totals["scored_total"], len(updates))
        decoded = None
        if made == self._progress_made and not self.worker.waits_for_others():
            decoded = self.fleet.work().decoded_tokens
        idle = decoded is not None and decoded == self._decoded_tokens
        self._progress_made, self._decoded_tokens = made, decoded
        self._look_at = self.clock.now + _LONGEST_PAUSE_SECONDS
        return idle or self.clock.now - (updates[-1].trained_at if updates else 0.0) > _LONGEST_WAIT_SECONDS

    def _stuck(self) -> str:
        queue = self.queue
        serving = sum(generator.record.serving for generator in self.fleet.generators.values())
        return (
            f"schedule.preset={self._settings.schedule.preset}: batch {queue.cut_step + 1} is not cut; after "
            f"{self.clock.now:.0f} virtual seconds the mesh waits for {queue.desired.waiting_for or 'its generators'}, "
            f"with {serving} serving generators of generator.replicas={self._settings.fleet.count} and {queue.leased} "
            "trajectories in flight: change the schedule, --fail or generator.replicas, or shorten lengths, their "
            "tool_seconds, reward_seconds or step_fixed_seconds"
        )

    def _result(self) -> SimulatedRun:
        queue = self.queue
        members = [m for groups in queue.groups.values() for group in groups.values() for m in group.members]
        masked = Counter(masked=sum(update.masked_tokens for update in self.trainer.updates))
        wasted = queue.dropped_tokens + self.worker.lost_tokens + masked
        return SimulatedRun(
            updates=tuple(self.trainer.updates),
            work=tuple(self._work),
            seconds=self.clock.now,
            wasted_tokens={reason: tokens for reason, tokens in sorted(wasted.items()) if tokens},
            in_flight_tokens=sum(m.tokens - m.wasted_tokens for m in members) + self.worker.unsaved_tokens(),
            event_count=self.clock.event_count,
            finished=queue.totals["finished_total"],
            rests_while_training=self._settings.schedule.rests_while_training,
        )
