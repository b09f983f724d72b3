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
