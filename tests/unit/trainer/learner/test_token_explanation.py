"""Every response token is explained by what the loss and the masks did to it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rollmesh.config.trainer import AlgorithmConfig, TrainerConfig
from rollmesh.trainer.learner.policy_scorer import PolicyScorer
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.types import Segment

from ....kit.made_batches import batch_of, environment_segment, policy_segment, trajectory
from .conftest import ModelMaker

SHIFT = {"clipped_high": -0.5, "trained": 0.0, "clipped_low": 0.5, "clipped_dual": -3.0}


def test_reasons_ratios_and_weights(make_model: ModelMaker) -> None:
    rng = np.random.default_rng(0)
    folder = make_model("qwen2")
    draft = trajectory("g0.0", [policy_segment(rng, 4, 1)], 1.0)
    ids = np.concatenate([draft.prompt.token_ids, draft.response_ids])
    own = PolicyScorer.from_folder(folder).logprobs([ids])[0][len(draft.prompt.token_ids) - 1 :]

    def shifted(words: list[str]) -> Segment:
        values = own + np.float32([SHIFT[w] for w in words])
        return Segment(
            token_ids=draft.response_ids,
            behavior_logprobs=values.astype(np.float32),
            policy_version=1,
            kv_min_version=1,
        )

    good, bad = (
        ["clipped_high", "trained", "trained", "trained"],
        ["trained", "clipped_low", "clipped_dual", "trained"],
    )
    members = [
        trajectory("g0.0", [shifted(good), environment_segment(rng, 1)], 1.0),
        trajectory("g0.1", [shifted(bad), policy_segment(rng, 1, 0)], 0.0),
    ]
    even = [trajectory(f"g1.{m}", [policy_segment(rng, 1, 1)], 1.0) for m in (0, 1)]
    config = TrainerConfig(algorithm=AlgorithmConfig(dual_clip=3.0))
    trainer = PolicyTrainer.from_folder(folder, config, max_token_staleness=0)
    trainer.restore_extra({"train_step": 1})
    tokens = list(trainer.explain(batch_of(members, even, train_step=2), {0: 0, 1: 1}))

    assert [t.reason for t in tokens] == [*good, "environment", *bad, "stale", "zero_advantage", "zero_advantage"]
    assert [t.position for t in tokens] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 0]
    assert [t.token_id for t in tokens[:4]] == draft.response_ids.tolist()
    for token, word in zip(tokens[:4] + tokens[5:9], good + bad, strict=True):
        assert token.ratio == pytest.approx(math.exp(-SHIFT[word]), rel=1e-4)
        assert token.weight == pytest.approx(token.ratio if word == "trained" else 0.0, rel=1e-4)
        assert token.advantage == pytest.approx(math.copysign(math.sqrt(0.5), token.advantage), rel=1e-4)
    tool, stale = tokens[4], tokens[9]
    assert tool.policy_version is None and tool.weight == 0
    assert stale.policy_version == 0 and stale.staleness == 1 and stale.weight == 0
    assert trainer.train_step == 1
