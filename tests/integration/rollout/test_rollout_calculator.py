"""The calculator that rollmesh ships, made as a run file names it, in rollouts on a real queue."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from rollmesh.rollout.rollout_metrics import RolloutMetrics
from rollmesh.runtime.metrics import Metrics
from rollmesh.tasks.environments.environment_protocol import environment_factory
from rollmesh.text import Tokenizer
from rollmesh.types import FinishReason, SegmentSource
from rollmesh.worker.environment_program import EnvironmentProgram

from .replicas import limits, running, schedule
from .scripted import STOP, VOCAB, ScriptedCluster, ScriptedGenerator, ScriptedReward, ScriptedTrainer

TURN, TURNS = 4, 3
RESULTS = {str(n): n for n in range(STOP)}
"""Answers of the calculator; the policy itself never writes these."""


@pytest.fixture
def tokenizer(tmp_path):
    """Every word that the policy can write is a call whose result is its id, modulo the results that are words."""
    calls = {f"<calc>{i}%{STOP}</calc>": i for i in range(STOP + 1, VOCAB)}
    words = {"[end]": STOP, **RESULTS, **calls}
    raw = RawTokenizer(WordLevel(words, unk_token="0"))
    raw.pre_tokenizer = WhitespaceSplit()
    raw.add_special_tokens(["[end]"])
    raw.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCAB, "eos_token_id": STOP}))
    return Tokenizer(tmp_path)


async def test_what_the_calculator_answers_is_in_the_context_and_never_in_the_loss(store, tokenizer):
    plan = schedule("sync", train_steps=1)
    await store.limits.init_run(limits(plan))
    cluster = ScriptedCluster(store, [ScriptedGenerator("a", stop_every=TURN)])
    trainer = ScriptedTrainer(store, cluster)
    await trainer.start()
    program = EnvironmentProgram(
        environment_factory("calculator", {"reply": " {result} "}),
        tokenizer,
        stop_token_ids=(STOP,),
        max_turns=TURNS,
        timeout_seconds=60.0,
        metrics=RolloutMetrics(Metrics("rollout")),
    )
    reward = ScriptedReward()
    async with running(store, cluster, reward, plan, program=program, chunk=2):
        batch = await trainer.train(1)
    trajectories = [t for group in batch.groups for t in group.trajectories]
    assert len(trajectories) == 8
    for trajectory in trajectories:
        turns, answers = _split(trajectory)
        assert len(turns) == TURNS and all(turn[-1] == STOP for turn in turns)
        assert answers == [[turn[-2] % STOP] for turn in turns[:-1]], "the last call of a turn counts"
        assert trajectory.segments[-1].source is SegmentSource.POLICY, "a reply to the last turn would be its answer"
        assert all(s.behavior_logprobs is None for s in trajectory.segments if s.source is SegmentSource.ENVIRONMENT)
        assert trajectory.finish_reason is FinishReason.LENGTH
    assert sum(reward.batches) == 8, "the verifier scores: a calculator pays nothing"


def _split(trajectory):
    """Token ids of the policy's turns and of the environment's answers, in order."""
    turns, answers, before = [], [], None
    for segment in trajectory.segments:
        parts = turns if segment.source is SegmentSource.POLICY else answers
        if segment.source is before:
            parts[-1] = np.concatenate((parts[-1], segment.token_ids))
        else:
            parts.append(segment.token_ids)
        before = segment.source
    return [t.tolist() for t in turns], [a.tolist() for a in answers]
