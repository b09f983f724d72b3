"""Samplers in combinations that cannot work: refused with the field and the remedy."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rollmesh.config import RunConfig

MIXTURE = {
    "source": {
        "type": "mixture",
        "parts": [
            {"name": "short", "weight": 0.5, "source": {"type": "countdown", "max_numbers": 5}},
            {"name": "long", "weight": 0.5, "source": {"type": "countdown", "min_numbers": 7}},
        ],
    }
}
TABLE = {"source": {"type": "jsonl", "path": "rows.jsonl"}}
PUZZLES = {"source": {"type": "countdown", "puzzles": 64}}


def run(sampler: str, data: dict[str, Any], options: dict[str, Any] | None = None, **schedule: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "run",
            "folder": "run",
            "model": {"path": "model"},
            "data": data,
            "curriculum": {"sampler": sampler, "sampler_options": options or {}},
            "schedule": schedule,
        }
    )


def test_every_sampler_has_data_on_which_it_works() -> None:
    assert run("domain_mix", MIXTURE).curriculum.sampler == "domain_mix"
    shares = {"targets": {"a": 0.25, "b": 0.75}}
    assert run("domain_mix", TABLE | {"domain_field": "topic"}, shares).curriculum.sampler_options == shares
    for sampler in ("difficulty", "frontier", "band", "unsolved"):
        assert run(sampler, PUZZLES).curriculum.sampler == sampler


@pytest.mark.parametrize(
    ("sampler", "data", "options", "problem"),
    [
        ("band", {}, {}, "countdown gives a new prompt at every draw.*set data.source.puzzles"),
        ("domain_mix", TABLE, {}, "domain_mix needs domains: set data.domain_field, or use data.source.type=mixture"),
        ("domain_mix", TABLE | {"domain_field": "topic"}, {}, "targets: name the share of every domain"),
        (
            "domain_mix",
            MIXTURE,
            {"targets": {"short": 0.5, "lang": 0.5}},
            "targets.lang: data.source has no such part; its parts are short, long",
        ),
        ("domain_mix", MIXTURE, {"targets": {"short": 0.5, "long": 0.6}}, "the shares sum to 1.1; they must sum to 1"),
        ("domain_mix", MIXTURE, {"targets": {"short": 0.0, "long": 1.0}}, "every share must be above 0"),
    ],
)
def test_a_sampler_that_its_data_cannot_serve_is_refused(
    sampler: str, data: dict[str, Any], options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValidationError, match=problem):
        run(sampler, data, options)


@pytest.mark.parametrize("schedule", [{"preset": "sorted"}, {"preset": "sync", "harvest": "trajectory"}])
def test_a_sampler_is_refused_where_every_trajectory_is_a_group(schedule: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="curriculum.sampler=band: with schedule.harvest=trajectory .*order"):
        run("band", PUZZLES, **schedule)
