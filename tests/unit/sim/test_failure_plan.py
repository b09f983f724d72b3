"""Failures on the command line."""

import pytest

from rollmesh.errors import ConfigError
from rollmesh.sim.failures import FailurePlan


def test_items_become_rates_and_numbers():
    plan = FailurePlan.parse(["deaths_per_hour=0.5", "slow_generators=2", "slow_factor=3"], seed=4)
    assert plan == FailurePlan(deaths_per_hour=0.5, slow_generators=2, slow_factor=3.0, seed=4)


@pytest.mark.parametrize(
    "item", ["meteor=1", "deaths_per_hour", "slow_generators=1.5", "deaths_per_hour=-1", "deaths_per_hour=nan"]
)
def test_a_bad_item_is_refused_with_its_text(item):
    with pytest.raises(ConfigError, match=f"--fail {item.partition('=')[0]}"):
        FailurePlan.parse([item])
