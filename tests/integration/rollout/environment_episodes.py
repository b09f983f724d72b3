"""Environments of the tests, and the episodes that a policy plays in them."""

import json

import numpy as np

from rollmesh.rollout.rollout_metrics import RolloutMetrics
from rollmesh.runtime.metrics import Metrics
from rollmesh.tasks.environments.environment_protocol import EnvironmentReply
from rollmesh.types import FinishReason, OutcomeKind, Prompt, SegmentSource, Trajectory
from rollmesh.worker.environment_program import EnvironmentProgram

from ...kit.records import policy_tokens
from ...kit.waiting import reached
from .replicas import running
from .scenes import members, whole_mesh
from .scripted import STOP, ScriptedGenerator, ScriptedReward, token_at

TURN = 6

REPLY = "w8 w9"


class CountingEnvironment:
    """Ends after three turns; its reward is the number of words that it was told."""

    replayable = True

    def __init__(self, log):
        self.log = log
        self.turns = []
        self.open = True

    async def reset(self, prompt):
        self.prompt = prompt

    async def step(self, response_text, idempotency_key):
        self.turns.append(response_text)
        self.log.append(idempotency_key.rpartition(":")[0])
        if len(self.turns) == 3:
            words = sum(len(t.split()) for t in self.turns)
            return EnvironmentReply(text="", done=True, reward=float(words))
        return EnvironmentReply(text=REPLY, done=False)

    async def aclose(self):
        self.open = False


class ForgetfulEnvironment(CountingEnvironment):
    replayable = False


def program_of(kind, tokenizer, log, *, timeout=60.0, max_turns=8, by_turn=False):
    return EnvironmentProgram(
        lambda: kind(log),
        tokenizer,
        stop_token_ids=(STOP,),
        max_turns=max_turns,
        timeout_seconds=timeout,
        metrics=RolloutMetrics(Metrics("rollout")),
        by_turn=by_turn,
    )


def expected_episode(trajectory_id):
    """Three turns of the policy, each up to the next multiple of TURN, with two words in between."""
    written = []
    for turn in range(3):
        end = len(written) - len(written) % TURN + TURN
        written += [(token_at(trajectory_id, i), True) for i in range(len(written), end - 1)] + [(STOP, True)]
        if turn < 2:
            written += [(8, False), (9, False)]
    return written


def check(batch):
    for trajectory in members(batch):
        expected = expected_episode(trajectory.trajectory_id)
        assert trajectory.response_ids.tolist() == [token for token, _ in expected]
        for segment in trajectory.segments:
            assert (segment.behavior_logprobs is None) == (segment.source is SegmentSource.ENVIRONMENT)
        sources = np.concatenate([[s.source is SegmentSource.POLICY] * len(s) for s in trajectory.segments])
        assert sources.tolist() == [own for _, own in expected]
        assert trajectory.finish_reason is FinishReason.ENVIRONMENT
        words = sum(own and token != STOP for token, own in expected)
        assert trajectory.outcome.kind is OutcomeKind.SCORED
        assert trajectory.shaped_reward == words


class SnapshottingEnvironment(ForgetfulEnvironment):
    def snapshot(self):
        return json.dumps(self.turns).encode()

    def restore(self, state):
        self.turns = json.loads(state)


def saved_episode(*segments):
    """A trajectory with these segments."""
    prompt = Prompt(prompt_id="p", token_ids=np.array([1], np.int32), verifier="exact")
    return Trajectory(trajectory_id="e0-0.0", group_id="e0-0", member_index=0, prompt=prompt, segments=segments)


def policy_turn(number):
    return policy_tokens([10 + number, STOP])


async def played_by_two_workers(store, program, log):
    """A batch whose first worker has left after ten turns, what the mesh held then, and the pool of the run."""
    slow = ScriptedGenerator("a", stop_every=TURN, seconds_per_token=0.02)
    async with whole_mesh(store, slow, program=program, chunk=4) as first:
        await reached(lambda: len(log) >= 10)
        await first.stop()
        left = await store.mesh.view()
        async with running(store, first.cluster, ScriptedReward(), first.plan, index=1, program=program, chunk=4):
            return await first.trainer.train(1), left, first.plan.pool_size
