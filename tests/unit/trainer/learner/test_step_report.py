"""The numbers of a step by hand, and the explanation of its tokens."""

import math
from dataclasses import replace

import numpy as np
import pytest

from rollmesh.algorithms.advantages import grpo, reinforce_pp
from rollmesh.algorithms.losses import ClipReason
from rollmesh.config.trainer import AlgorithmConfig, TrainerConfig
from rollmesh.trainer.learner.policy_scorer import PolicyScorer
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.trainer.learner.step_report import TokenResults, batch_stats, effective_sample_size, policy_stats
from rollmesh.trainer.learner.train_batch import TrainBatch, build_train_batch
from rollmesh.types import FinishReason, OutcomeKind, RewardOutcome, Segment

from ....kit.made_batches import batch_of, environment_segment, policy_segment, trajectory
from ....kit.records import policy_tokens
from .conftest import ModelMaker

VERSIONS = {0: 0, 1: 1, 2: 2}


@pytest.fixture
def flat() -> TrainBatch:
    """Two groups at train step 3: one mixed, one all wrong; tokens older than 1 step are masked."""
    rng = np.random.default_rng(0)
    mixed = [
        trajectory("a.0", [policy_segment(rng, 2, 0), policy_segment(rng, 3, 1), policy_segment(rng, 4, 2)], 1.0),
        trajectory(
            "a.1",
            [policy_segment(rng, 5, 2, kv_min_version=1), environment_segment(rng, 2)],
            finish=FinishReason.LENGTH,
        ),
    ]
    wrong = [trajectory(f"b.{m}", [policy_segment(rng, 6, 2)], 0.0) for m in (0, 1)]
    batch = batch_of(mixed, wrong, train_step=3)
    return build_train_batch(batch, VERSIONS, grpo, max_token_staleness=1)


def results_for(flat: TrainBatch, shift: float = 0.0) -> TokenResults:
    n = len(flat.token_ids)
    return TokenResults(
        logprobs=flat.behavior_logprobs.astype(np.float64) + shift,
        entropy=np.arange(n, dtype=np.float64),
        ratio=np.full(n, math.exp(shift)),
        clip=np.zeros(n, np.int8),
        active=np.ones(n, np.bool_),
        as_served=np.ones(n, np.bool_),
    )


def test_a_group_of_assigned_values_is_all_wrong_and_the_mean_verdict_is_of_those_that_were_given() -> None:
    rng, late = np.random.default_rng(0), RewardOutcome(kind=OutcomeKind.TIMED_OUT)
    assigned = [trajectory(f"a.{m}", [policy_segment(rng, 3, 2)], -1.0, outcome=late) for m in (0, 1)]
    judged = [trajectory(f"b.{m}", [policy_segment(rng, 3, 2)], float(m)) for m in (0, 1)]
    for groups, mean in (([assigned, judged], 0.5), ([assigned], math.nan)):
        stats = batch_stats(build_train_batch(batch_of(*groups, train_step=3), VERSIONS, grpo))
        assert stats.outcome_mean == pytest.approx(mean, nan_ok=True)
        assert (stats.all_right_groups, stats.all_wrong_groups) == (0, 1)


def test_groups_of_one_are_neither_all_right_nor_all_wrong() -> None:
    rng = np.random.default_rng(0)
    groups = [[trajectory(f"{name}.0", [policy_segment(rng, 3, 2)], reward)] for name, reward in (("a", 1.0), ("b", 0))]
    stats = batch_stats(build_train_batch(batch_of(*groups, train_step=3), VERSIONS, reinforce_pp))
    assert (stats.groups, stats.all_right_groups, stats.all_wrong_groups) == (2, 0, 0)
    assert stats.advantage_abs_mean == pytest.approx(0.5 / math.sqrt(0.5), rel=1e-5)


def test_batch_is_counted_by_hand(flat: TrainBatch) -> None:
    stats = batch_stats(flat)
    assert (stats.groups, stats.trajectories, stats.original_tokens, stats.trained_tokens) == (2, 4, 26, 24)
    assert stats.masked_fraction == pytest.approx(2 / 26)
    assert stats.reward_mean == 0.25 and stats.outcome_mean == 0.25
    assert (stats.all_right_groups, stats.all_wrong_groups) == (0, 1)
    assert stats.truncated_share == 0.25
    assert stats.off_policy_token_share == pytest.approx(3 / 24)
    assert stats.mixed_cache_token_share == pytest.approx(5 / 24)
    assert stats.token_staleness.histogram == {0: 21, 1: 3} and stats.token_staleness.max == 1
    assert stats.trajectory_staleness.histogram == {0: 3, 1: 1}
    assert stats.version_span.histogram == {0: 3, 1: 1}
    assert stats.response_length_mean == 7.0
    assert stats.response_length_deciles[0] == 6 and stats.response_length_deciles[-1] == 9


def test_identical_policies_have_no_divergence_and_a_full_sample(flat: TrainBatch) -> None:
    stats = policy_stats(flat, results_for(flat), 2, {})
    assert stats.kl_behavior_k1 == stats.kl_behavior_k3 == 0
    assert stats.effective_sample_size == pytest.approx(4) and stats.effective_sample_share == pytest.approx(1)
    assert stats.logprob_gap_pure.tokens == 16 and stats.logprob_gap_mixed_cache.tokens == 5
    assert stats.entropy == pytest.approx(np.flatnonzero(flat.loss_mask).mean())


def test_divergence_and_gap_follow_a_shift_of_the_logprobs(flat: TrainBatch) -> None:
    stats = policy_stats(flat, results_for(flat, 0.25), 2, {"mixed_cache": 5})
    assert stats.kl_behavior_k1 == pytest.approx(-0.25)
    assert stats.kl_behavior_k3 == pytest.approx(math.exp(0.25) - 1 - 0.25)
    assert stats.logprob_gap_pure.max == pytest.approx(0.25) and stats.old_logprob_fallbacks == {"mixed_cache": 5}
    lengths = np.array([7, 5, 6, 6])
    weights = np.exp(0.25 * lengths)
    assert stats.effective_sample_size == pytest.approx(weights.sum() ** 2 / (weights**2).sum())


def test_ratios_are_split_by_staleness(flat: TrainBatch) -> None:
    results = results_for(flat)
    results.ratio[flat.staleness == 1] = 2.0
    results.clip[flat.staleness == 1] = ClipReason.HIGH
    stats = policy_stats(flat, results, 2, {})
    assert sorted(stats.ratio_by_staleness) == [0, 1]
    assert stats.ratio_by_staleness[1].mean == 2.0 and stats.ratio_by_staleness[1].clipped_high == 1.0
    assert stats.ratio_by_staleness[0].mean == 1.0 and stats.ratio.clipped_high == pytest.approx(3 / 24)


def test_the_gap_counts_tokens_as_served_only(flat: TrainBatch) -> None:
    results = results_for(flat)
    results.as_served[flat.sequence_index >= 2] = False
    stats = policy_stats(flat, results, 2, {})
    assert stats.logprob_gap_pure.tokens == 4 and stats.logprob_gap_mixed_cache.tokens == 5
    assert policy_stats(flat, results, -1, {}).logprob_gap_pure.tokens == 0


def test_effective_sample_size_survives_weights_beyond_float_range() -> None:
    log_ratios = np.array([5000.0, 4000.0, -5000.0])
    assert effective_sample_size(log_ratios, np.array([0, 1, 2])) == pytest.approx(1)
    assert effective_sample_size(log_ratios[:0], np.empty(0, np.int64)) == 0
    assert effective_sample_size(np.zeros(6), np.array([4, 4, 7, 7, 9, 9])) == pytest.approx(3)


def test_rewards_are_told_apart_by_the_part_of_the_mixture() -> None:
    rng = np.random.default_rng(0)
    groups = [
        [replace(t, prompt=replace(t.prompt, domain=domain)) for t in members]
        for domain, members in (
            ("math", [trajectory(f"a.{m}", [policy_segment(rng, 3, 2)], float(m)) for m in (0, 1)]),
            ("code", [trajectory(f"b.{m}", [policy_segment(rng, 3, 2)], 1.0) for m in (0, 1)]),
            ("math", [trajectory(f"c.{m}", [policy_segment(rng, 3, 2)], 0.25) for m in (0, 1)]),
        )
    ]
    stats = batch_stats(build_train_batch(batch_of(*groups, train_step=3), VERSIONS, grpo))
    assert stats.reward_by_domain == {"code": 1.0, "math": 0.375}


SHIFT = {"clipped_high": -0.5, "trained": 0.0, "clipped_low": 0.5, "clipped_dual": -3.0}


def test_reasons_ratios_and_weights(make_model: ModelMaker) -> None:
    rng = np.random.default_rng(0)
    folder = make_model("qwen2")
    draft = trajectory("g0.0", [policy_segment(rng, 4, 1)], 1.0)
    ids = np.concatenate([draft.prompt.token_ids, draft.response_ids])
    own = PolicyScorer.from_folder(folder).logprobs([ids])[0][len(draft.prompt.token_ids) - 1 :]

    def shifted(words: list[str]) -> Segment:
        values = own + np.float32([SHIFT[w] for w in words])
        return policy_tokens(draft.response_ids, 1, behavior_logprobs=values.astype(np.float32))

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
    trainer = PolicyTrainer(folder, config, max_token_staleness=0)
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
