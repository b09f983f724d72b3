"""Passes of the simulated trainer that only compute log-probabilities: as many as the trainer of the mesh makes."""

from __future__ import annotations

import pytest

from rollmesh.sim.arms import arms_of


@pytest.mark.parametrize(
    ("preset", "minibatches", "passes"),
    [
        ("copris", 4, 0),  # sampler: the log-probabilities of the engine
        ("areal", 1, 0),  # recompute: the pass of the gradient has them
        ("areal", 4, 1),
        ("april", 4, 0),  # sampler
        ("ulorl", 4, 1),  # current
        ("copris_paper", 1, 1),  # stage_end
    ],
)
def test_one_minibatch_needs_no_pass_of_its_own_for_the_weights_at_the_start_of_the_step(
    preset: str, minibatches: int, passes: int
) -> None:
    overrides = [f"schedule.preset={preset}", f"trainer.minibatches={minibatches}"]
    (arm,) = arms_of(None, overrides, [], [])
    assert arm.settings.trainer.evidence_passes == passes


@pytest.mark.parametrize(
    ("algorithm", "passes"),
    [
        ("old_logprobs: recompute, masks: [icepop]", 1),  # the mask needs them before the gradient
        ("old_logprobs: ewma, masks: [icepop]", 1),
        ("old_logprobs: sampler, masks: [mastered]", 1),
        ("old_logprobs: current, masks: [mastered]", 1),  # one pass for both
        ("old_logprobs: snapshot, masks: [mastered]", 2),
        ("old_logprobs: sampler, kl_coefficient: 0.1", 1),
        ("old_logprobs: ewma, masks: [mastered], kl_coefficient: 0.1", 3),
        (
            "old_logprobs: sampler, advantage: drpo, advantage_options: {longest_tokens: 16000}, "
            "aggregation: sequence_mean_token_mean",
            1,
        ),
        ("old_logprobs: sampler, advantage: tba, advantage_options: {beta: 0.1}, aggregation: token_mean", 2),
    ],
)
def test_masks_and_advantages_and_the_reference_need_passes(algorithm: str, passes: int) -> None:
    (arm,) = arms_of(None, [f"trainer.algorithm={{{algorithm}}}"], [], [])
    assert arm.settings.trainer.evidence_passes == passes
