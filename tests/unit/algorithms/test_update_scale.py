"""The factor on the learning rate follows the effective sample size."""

import pytest

from rollmesh.algorithms.ratios import ess_scale


def test_the_factor_is_the_root_or_the_share_itself_and_never_above_one() -> None:
    assert ess_scale(0.25, base=1.0, rule="sqrt") == 0.5
    assert ess_scale(0.25, base=0.5, rule="linear") == 0.5
    assert ess_scale(0.1, base=0.4, rule="sqrt") == pytest.approx(0.5)
    assert ess_scale(0.9, base=0.55, rule="sqrt") == ess_scale(0.9, base=0.55, rule="linear") == 1.0
