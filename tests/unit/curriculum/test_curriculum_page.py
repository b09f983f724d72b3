"""The methods page has every planner, group shaper and budget with its options."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from rollmesh.config.budget_methods import BUDGET_METHODS
from rollmesh.config.methods import Method
from rollmesh.config.planner_methods import PLANNER_METHODS
from rollmesh.config.shaper_methods import SHAPER_METHODS
from rollmesh.curriculum.budgets.budget_registry import BUDGETS
from rollmesh.curriculum.planners.planner_registry import PLANNERS
from rollmesh.curriculum.shapers.shaper_registry import SHAPERS

METHODS = (Path(__file__).parents[3] / "docs" / "methods.md").read_text()


@pytest.mark.parametrize(
    ("methods", "functions"),
    [(PLANNER_METHODS, {*PLANNERS}), (SHAPER_METHODS, {*SHAPERS}), (BUDGET_METHODS, {"constant", *BUDGETS})],
    ids=["planners", "group shapers", "budgets"],
)
def test_the_methods_page_states_every_option_with_its_default(
    methods: Mapping[str, Method], functions: set[str]
) -> None:
    assert methods.keys() == functions
    for name, method in methods.items():
        (row,) = re.findall(rf"^\| `{name}` \|.*\|$", METHODS, flags=re.MULTILINE)
        for option, field in method.options.model_fields.items():
            default = "required" if field.is_required() else json.dumps(field.default)
            assert f"`{option}` ({default})" in row, f"{name}.{option}"
