"""A mesh in one process, for a page to look at: a leader, workers, a trainer and generators on a real queue.

    python feeder.py RUN.yaml [--rollouts 96] [--still]

Every role goes through the store's own API, so that the queue, the registry and the ledger are what real services
leave there; the tokens are random words and no model runs. ``--still`` leases and writes once and then only keeps its
sessions alive: a queue of any size that does not move. A moving one is held still by SIGUSR1 and goes on after SIGUSR2.
Prints ``feeding`` once the first look would see everything and whenever it goes on, ``holding`` once it stands still.
"""

import argparse
import asyncio
import json
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rollmesh.config import RunConfig, load_run_config
from rollmesh.mesh import Cursor, Desired
from rollmesh.scheduling import run_limits
from rollmesh.store import Append, EvalRequest, EvalResult, Finish, NewGroup, Score, TokenDigest, TrajectoryStore
from rollmesh.types import (
    FinishReason,
    GeneratorRecord,
    OutcomeKind,
    PolicyRecord,
    Prompt,
    RewardOutcome,
    Segment,
    SegmentSource,
)

HOSTILE = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"
"""Text from outside that a careless page would run."""
STEP_SECONDS = 0.4
WORKERS = 2
WORDS = 90
"""Token ids of the demo's model that are plain words."""


@dataclass
class Rollout:
    """One rollout that a worker holds."""

    trajectory_id: str
    target: int
    saved: int
    speed: int
    digest: TokenDigest
    """Of the saved tokens."""
    incarnation: int = 0


@dataclass
class Feeder:
    """Every role of the mesh, one step after the other."""

    config: RunConfig
    store: TrajectoryStore
    rng: random.Random
    pool: int
    sessions: list[str] = field(default_factory=list)
    held: list[dict[str, Rollout]] = field(default_factory=list)
    leader: str = ""
    trainer: str = ""
    version: int = 0
    paused: bool = False
    generators: list[GeneratorRecord] = field(default_factory=list)

    async def start(self) -> None:
        limits = replace(run_limits(self.config), max_attempts=3, filter_zero_variance=True)
        await self.store.limits.init_run(limits)
        self.leader = await self.store.leadership.acquire("feeder") or ""
        self.trainer = await self.store.training.open_session("feeder")
        await self._announce(0)
        self.sessions = [await self.store.sessions.open(f"rollout-{n}") for n in range(WORKERS)]
        self.held = [{} for _ in range(WORKERS)]
        self.generators = [_generator(n) for n in range(3)]
        await self._register()
        await self._lead()

    async def leave_letters(self) -> None:
        """Three dead letters, one of them with hostile text."""
        leased = [item.trajectory.trajectory_id for item in await self.store.trajectories.lease(self.sessions[0], 3)]
        parts = [Append(trajectory_id=i, token_offset=0, segments=[self._segment(40, 0)]) for i in leased]
        await self.store.trajectories.append(self.sessions[0], parts)
        reasons = ("environment: no answer in 30 s", HOSTILE, "4 attempts without progress")
        await self.store.trajectories.fail(self.sessions[0], list(zip(leased, reasons, strict=True)))

    async def step(self) -> None:
        """One beat of everybody."""
        for number in range(WORKERS):
            await self._work(number)
        await self._lead()
        await self._train()
        await self._register()

    async def announce_more(self, versions: int) -> None:
        """Versions that nobody trained: only for a queue that stands still."""
        for _ in range(versions):
            await self._announce(self.version + 1)

    async def keep_alive(self) -> None:
        """Heartbeats alone."""
        for session in self.sessions:
            await self.store.sessions.heartbeat(session)
        await self.store.leadership.renew(self.leader)
        await self._register()

    async def write_once(self) -> None:
        """Tokens of up to four versions for everything that is held."""
        for number in range(WORKERS):
            await self._lease(number)
            items = []
            for rollout in self.held[number].values():
                versions = range(max(0, self.version - rollout.speed % 4), self.version + 1)
                segments = [self._segment(16, version) for version in versions]
                rollout.digest = rollout.digest.extended(segments)
                items.append(Append(trajectory_id=rollout.trajectory_id, token_offset=0, segments=segments))
            await self.store.trajectories.append(self.sessions[number], items)

    async def _work(self, number: int) -> None:
        session, held = self.sessions[number], self.held[number]
        await self.store.sessions.heartbeat(session)
        if self.paused:
            await self.store.trajectories.release(session, list(held), "paused")
            held.clear()
            return
        await self._lease(number)
        await self._restart_slow(session, [r for r in held.values() if r.speed < 12 and r.saved and not r.incarnation])
        ended = [r for r in held.values() if r.saved + r.speed >= r.target]
        running = [r for r in held.values() if r.saved + r.speed < r.target]
        appends = [Append(**self._write(r)) for r in running]
        for result in await self.store.trajectories.append(session, appends):
            held[result.trajectory_id].saved = result.saved_token_count
        await self._finish(session, held, ended)

    async def _lease(self, number: int) -> None:
        share = -(-self.pool // WORKERS)
        while (room := share - len(self.held[number])) > 0:
            leased = await self.store.trajectories.lease(self.sessions[number], room)
            if not leased:
                return
            for item in leased:
                self.held[number][item.trajectory.trajectory_id] = Rollout(
                    trajectory_id=item.trajectory.trajectory_id,
                    target=int(min(1200, self.rng.lognormvariate(5.2, 0.8))),
                    saved=item.trajectory.response_token_count,
                    speed=self.rng.randint(6, 30),
                    digest=TokenDigest().extended(item.trajectory.segments),
                    incarnation=item.incarnation,
                )

    async def _restart_slow(self, session: str, slow: Sequence[Rollout]) -> None:
        """Restart rollouts, so that the history of some is not empty."""
        incarnations = await self.store.trajectories.restart(session, [r.trajectory_id for r in slow])
        for rollout, incarnation in zip(slow, incarnations, strict=True):
            if incarnation is not None:
                rollout.saved, rollout.digest, rollout.incarnation = 0, TokenDigest(), incarnation

    async def _finish(self, session: str, held: dict[str, Rollout], ended: Sequence[Rollout]) -> None:
        finishes = [
            Finish(finish_reason=FinishReason.LENGTH if r.target == 1200 else FinishReason.STOP, **self._write(r))
            for r in ended
        ]
        await self.store.trajectories.finish(session, finishes)
        await self.store.trajectories.score(session, [self._score(r.trajectory_id) for r in ended])
        for rollout in ended:
            del held[rollout.trajectory_id]

    def _score(self, trajectory_id: str) -> Score:
        value = float(self.rng.random() < 0.3 + 0.5 * min(1.0, self.version / 20))
        outcome = RewardOutcome(
            kind=OutcomeKind.SCORED, value=value, parts={"exact": value, "format": 1.0}, message=f"{HOSTILE} right"
        )
        return Score(trajectory_id=trajectory_id, outcome=outcome, shaped_reward=value)

    def _write(self, rollout: Rollout) -> dict[str, Any]:
        """The next save of a rollout."""
        segments, before = self._segments(rollout), rollout.digest
        rollout.digest = before.extended(segments)
        return {
            "trajectory_id": rollout.trajectory_id,
            "token_offset": rollout.saved,
            "segments": segments,
            "digest": before,
            "incarnation": rollout.incarnation,
        }

    def _segments(self, rollout: Rollout) -> list[Segment]:
        if rollout.saved and self.rng.random() < 0.04:
            tool = Segment(
                token_ids=self._tokens(12),
                behavior_logprobs=None,
                policy_version=self.version,
                kv_min_version=self.version,
                source=SegmentSource.ENVIRONMENT,
            )
            return [tool, self._segment(rollout.speed, self.version)]
        return [self._segment(rollout.speed, self.version)]

    def _segment(self, tokens: int, version: int) -> Segment:
        logprobs = -np.array([self.rng.expovariate(1.5) for _ in range(tokens)], np.float32)
        return Segment(
            token_ids=self._tokens(tokens), behavior_logprobs=logprobs, policy_version=version, kv_min_version=version
        )

    def _tokens(self, tokens: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        return np.array([self.rng.randrange(3, WORDS) for _ in range(tokens)], np.int32)

    async def _lead(self) -> None:
        await self.store.leadership.renew(self.leader)
        view = await self.store.mesh.view()
        self.paused = view.user_paused
        reason = "a person paused the run" if self.paused else ""
        await self.store.leadership.set_desired(
            self.leader, Desired(pool_size=self.pool, paused=self.paused, reason=reason)
        )
        size = self.config.schedule.group_size
        wanted = -(-2 * self.pool // size) - view.open_groups
        if wanted > 0:
            at = await self.store.leadership.cursor()
            groups = [self._group(at.index + n, size) for n in range(wanted)]
            await self.store.leadership.admit(self.leader, groups, at, Cursor(index=at.index + wanted))
        batch = self.config.schedule.groups_per_batch
        if view.cut_step == view.trained_step and len(view.ready) >= batch:
            fresh = [g.group_id for g in view.ready if (g.min_train_step or 0) >= view.cut_step - 4]
            stale = [g.group_id for g in view.ready if g.group_id not in fresh]
            await self.store.leadership.evict(self.leader, stale, "stale")
            if len(fresh) >= batch:
                await self.store.leadership.cut(self.leader, view.cut_step + 1, fresh[:batch])

    def _group(self, index: int, size: int) -> NewGroup:
        prompt = Prompt(
            prompt_id=str(index),
            token_ids=self._tokens(17),
            verifier="countdown",
            metadata={"target": 26, "numbers": [3, 5, 7], "note": HOSTILE},
        )
        return NewGroup(group_id=f"e0-{index}", prompt=prompt, needed=size, epoch=0, index=index)

    async def _train(self) -> None:
        view = await self.store.mesh.view()
        if view.cut_step == view.trained_step:
            return
        step = view.cut_step
        batch = await self.store.training.claim(self.trainer, step, 1.0)
        if batch is None:
            return
        await self.store.training.confirm_batch_file(self.trainer, step, f"digest-{step}")
        await self.store.training.report_trained(self.trainer, step)
        await self.store.training.report_committed(self.trainer, step)
        members = [t for g in batch.groups for t in g.trajectories]
        oldest = [step - 1 - min(t.policy_versions, default=step - 1) for t in members]
        self._report(step, [t.response_token_count for t in members], [t.shaped_reward for t in members], oldest)
        await self._announce(step)
        if step % 3 == 0:
            await self._evaluate(step)

    def _report(self, step: int, lengths: list[int], rewards: list[float], staleness: list[int]) -> None:
        histogram = {str(s): staleness.count(s) for s in sorted(set(staleness))}
        report = {
            "train_step": step,
            "policy_version": step,
            "time": time.time(),
            "reward_mean": float(np.mean(rewards)),
            "response_length_mean": float(np.mean(lengths)),
            "staleness_mean": float(np.mean(staleness)),
            "off_policy_token_share": 0.4,
            "wait_seconds": 0.2,
            "seconds": {"forward": 0.1, "backward": 0.2},
            "mesh": {"goodput": 0.9 + 0.05 * self.rng.random()},
            "policy": {"entropy": 1.2 / (1 + step / 10), "ratio": {"mean": 1.0 + 0.01 * self.rng.random()}},
            "batch": {"trajectory_staleness": {"mean": float(np.mean(staleness)), "histogram": histogram}},
        }
        with (Path(self.config.folder) / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(report) + "\n")

    async def _evaluate(self, version: int) -> None:
        name = f"at-{version}"
        await self.store.evaluations.request(EvalRequest(evaluation_id=name, policy_version=version, prompt_count=64))
        await self.store.evaluations.claim(self.sessions[0])
        mean = 0.37 + 0.02 * min(20, version) + self.rng.gauss(0, 0.02)
        result = EvalResult(mean=mean, standard_error=0.03, sample_count=64)
        await self.store.evaluations.finish(self.sessions[0], name, result)

    async def _announce(self, version: int) -> None:
        record = PolicyRecord(
            policy_version=version, train_step=version, path=f"{version}-feeder", manifest_digest="ab" * 32
        )
        await self.store.policies.announce(self.trainer, record)
        self.version = version

    async def _register(self) -> None:
        flying = sum(map(len, self.held))
        for number, record in enumerate(self.generators):
            # The last one lags a version behind and is slow to come back: pages have to show such things.
            lagging = number == len(self.generators) - 1
            served = max(0, self.version - lagging)
            share = flying // len(self.generators)
            await self.store.generators.register(
                replace(record, policy_version=served, running_count=min(64, share), waiting_count=max(0, share - 64)),
                ttl=10.0,
            )


def _generator(number: int) -> GeneratorRecord:
    return GeneratorRecord(
        instance_id=f"{number:02x}" * 16,
        address=f"127.0.0.1:{50051 + number}",
        policy_version=0,
        running_count=0,
        waiting_count=0,
        slot_count=64,
        kv_token_capacity=81_920,
        serving=number != 1,
        reason="" if number != 1 else "drains",
    )


async def feed(config: RunConfig, rollouts: int, still: bool) -> None:
    """Feed until a signal ends the process."""
    async with await TrajectoryStore.connect(config.store, config.name) as store:
        feeder = Feeder(config=config, store=store, rng=random.Random(7), pool=rollouts)
        await feeder.start()
        if still:
            await feeder.announce_more(5)
            await feeder.write_once()
        else:
            await feeder.leave_letters()
            await feeder.step()
        hold = _hold_on_signals()
        print("feeding", flush=True)
        held = False
        while True:
            await asyncio.sleep(STEP_SECONDS)
            asked = hold.is_set()
            await (feeder.keep_alive() if still or asked else feeder.step())
            if asked != held:
                held = asked
                print("holding" if held else "feeding", flush=True)


def _hold_on_signals() -> asyncio.Event:
    """Set while the queue is to stand still."""
    hold, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, hold.set)
    loop.add_signal_handler(signal.SIGUSR2, hold.clear)
    return hold


def main() -> None:
    """Read the command line and feed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--rollouts", type=int, default=96)
    parser.add_argument("--still", action="store_true")
    arguments = parser.parse_args()
    config = load_run_config(arguments.run, ())
    Path(config.folder).mkdir(parents=True, exist_ok=True)
    asyncio.run(feed(config, arguments.rollouts, arguments.still))


if __name__ == "__main__":
    main()
