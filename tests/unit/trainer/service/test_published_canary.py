"""The canary of a policy whose log-probabilities are not finite: the initial model is at fault, or the training."""

from __future__ import annotations

import numpy as np
import pytest

from rollmesh.errors import ConfigError, TrainingDiverged
from rollmesh.trainer.service.publishing import canary_sequences, scored_canary


@pytest.mark.parametrize(
    ("train_step", "error", "remedy"),
    [(0, ConfigError, "model.path: .*use another checkpoint"), (3, TrainingDiverged, "lower trainer.learning_rate")],
)
def test_only_a_trained_policy_is_blamed_on_the_learning_rate(
    train_step: int, error: type[Exception], remedy: str
) -> None:
    sequences = canary_sequences(40, 2)
    logprobs = [np.full(len(ids) - 1, np.nan, np.float32) for ids in sequences]
    with pytest.raises(error, match=remedy):
        scored_canary(train_step, sequences, logprobs)
