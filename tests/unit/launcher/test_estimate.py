"""Lines of the estimate that ``rollmesh config validate`` prints only for some schedules."""

from __future__ import annotations

from typing import Any

import pytest

from rollmesh.config import RunConfig
from rollmesh.launcher.estimate import estimate


def meaning(**schedule: Any) -> dict[str, str]:
    """Meaning of every quantity of the estimate, with its value in front."""
    values = {"name": "x", "folder": "runs/x", "model": {"path": "models/tiny"}, "schedule": schedule}
    if schedule["preset"] == "sorted":
        values["trainer"] = {"algorithm": {"advantage": "reinforce_pp"}}
    columns = estimate(RunConfig.model_validate(values)).table().columns
    names, numbers, meanings = ([str(cell) for cell in column.cells] for column in columns)
    return {name: f"{number}: {text}" for name, number, text in zip(names, numbers, meanings, strict=True)}


@pytest.mark.parametrize(
    ("preset", "quantity", "number"),
    [
        ("rollpacker", "begun again", "at most 0.20"),
        ("sorted", "begun again", "at most 1.50"),
        ("roll", "evicted", "depends on the lengths"),
    ],
)
def test_a_schedule_that_drops_tokens_over_the_bound_says_how_often_and_where_their_number_is_predicted(
    preset: str, quantity: str, number: str
) -> None:
    found = meaning(preset=preset, groups_per_batch=16)
    assert found[quantity].startswith(f"{number}: ")
    assert "rollmesh sim RUN.yaml" in found[quantity]


def test_a_schedule_that_waits_for_its_groups_has_no_such_line() -> None:
    assert not {"begun again", "evicted"} & meaning(preset="copris").keys()
