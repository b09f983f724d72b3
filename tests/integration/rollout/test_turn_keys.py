"""Idempotency keys of an environment's turns: a repeated turn keeps its key, and another text has another one."""

import pytest

from rollmesh.types import FinishReason, SamplingParams
from rollmesh.worker.active_trajectory import ActiveTrajectory
from rollmesh.worker.environment_program import EnvironmentProgram
from rollmesh.worker.program import RolloutContext

from .environment_episodes import (
    CountingEnvironment,
    ForgetfulEnvironment,
    SnapshottingEnvironment,
    policy_turn,
    saved_episode,
)
from .scripted import STOP


class KeyLog:
    """Sampler of given turns; collects the keys of an environment, and tokens and state at each snapshot."""

    def __init__(self, tokenizer, kind, turns):
        self.keys, self.snapshots, self.turns = [], [], list(turns)
        keys = self.keys

        class Environment(kind):
            async def step(self, response_text, idempotency_key):
                keys.append(idempotency_key)
                return await super().step(response_text, idempotency_key)

        self.program = EnvironmentProgram(
            lambda: Environment([]), tokenizer, stop_token_ids=(STOP,), max_turns=8, timeout_seconds=60.0, metrics=None
        )

    async def sample(self, active, budget, params, **options):
        active.add(policy_turn(self.turns.pop(0)))
        return FinishReason.STOP

    async def run(self, segments=(), snapshot=None, pinned_version=None):
        active = ActiveTrajectory(saved_episode(*segments), snapshot=snapshot)

        async def save(active):
            pass

        async def keep(active, snapshot):
            self.snapshots.append((list(active.segments), snapshot))

        rollout = RolloutContext(
            active=active,
            caller=self,
            params=SamplingParams(stop_token_ids=(STOP,)),
            budget=100,
            save=save,
            report_first_token=save,
            restart=save,
            keep_snapshot=keep,
            pinned_version=pinned_version,
        )
        result = await self.program.run(rollout)
        return active.result(result.reason)


async def keys_of(tokenizer, turns, **options):
    log = KeyLog(tokenizer, ForgetfulEnvironment, turns)
    await log.run(**options)
    return log.keys


async def test_a_turn_with_other_tokens_or_after_other_tokens_has_another_key(tokenizer):
    first = await keys_of(tokenizer, [0, 1, 2])
    assert [key.rpartition(":")[0] for key in first] == ["e0-0.0:0", "e0-0.0:1", "e0-0.0:2"]
    assert await keys_of(tokenizer, [0, 1, 2]) == first
    second = await keys_of(tokenizer, [0, 5, 2])
    assert second[0] == first[0]
    assert not set(second[1:]) & set(first)


async def test_evaluations_of_two_versions_have_different_keys_for_the_same_tokens(tokenizer):
    keys = [await keys_of(tokenizer, [0, 1, 2], pinned_version=version) for version in (1, 2, 2)]
    assert keys[1] == keys[2]
    assert not set(keys[0]) & set(keys[1])


async def test_a_replay_repeats_the_keys(tokenizer):
    log = KeyLog(tokenizer, CountingEnvironment, [0, 1, 2])
    trajectory = await log.run()
    first = list(log.keys)
    await log.program.outcome_of(trajectory)
    assert log.keys[3:] == first, "scored again after its worker died"
    again = KeyLog(tokenizer, CountingEnvironment, [2])
    await again.run(trajectory.segments[:4])
    assert again.keys == first


@pytest.mark.parametrize(("saved", "covered"), [(1, 1), (2, 2), (2, 1)])
async def test_a_turn_after_a_snapshot_has_the_key_of_the_unbroken_episode(tokenizer, saved, covered):
    log = KeyLog(tokenizer, SnapshottingEnvironment, [0, 1, 2])
    await log.run()
    segments, snapshot = log.snapshots[saved - 1][0], log.snapshots[covered - 1][1]
    resumed = KeyLog(tokenizer, SnapshottingEnvironment, [0, 1, 2][saved:])
    await resumed.run(segments, snapshot)
    assert resumed.keys == log.keys[covered:]
