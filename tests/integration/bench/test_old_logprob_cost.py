"""The bench of loglinear compares sources at the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rollmesh.bench.old_logprob_cost import _ratios, _sampled, _train, _trainer
from rollmesh.bench.train import ragged_batch, write_demo_model

pytestmark = pytest.mark.long


def test_the_ratio_of_recompute_is_1_and_that_of_loglinear_leaves_1_with_the_first_update(tmp_path: Path) -> None:
    write_demo_model(tmp_path)
    trainer = _trainer(tmp_path, "recompute", 1)
    batch = _sampled(trainer, ragged_batch(seed=0, tokens=600))
    np.testing.assert_allclose(_ratios(trainer, batch, "loglinear"), 1, atol=1e-5)
    _train(trainer, batch)
    np.testing.assert_allclose(_ratios(trainer, batch, "recompute"), 1, atol=1e-9)
    loglinear = _ratios(trainer, batch, "loglinear")
    assert np.isfinite(loglinear).all() and np.abs(loglinear - 1).max() > 1e-3
