"""The command ``rollmesh config methods`` prints every method that a run file can name."""

from __future__ import annotations

import inspect
from typing import get_args

import pytest
from typer.testing import CliRunner

from rollmesh.cli.configuration import POINTS
from rollmesh.cli.main import app
from rollmesh.config.old_logprob_methods import ReplayConfig
from rollmesh.config.trainer import AlgorithmConfig
from rollmesh.user_code import load_target

EVERY = [(point, name) for point, found in POINTS.items() for name in found.methods]


def test_every_method_is_printed_with_its_point_options_and_source() -> None:
    result = CliRunner().invoke(app, ["config", "methods"])
    assert result.exit_code == 0
    headings = [line for line in result.output.splitlines() if not line.startswith(" ")]
    assert headings == [f"{point}: {name}" for point, name in EVERY]
    assert "  options: longest_tokens (required), length_scale (0.1), tau (10.0)\n" in result.output
    assert result.output.count("  source: ") == len(headings)


@pytest.mark.parametrize(("point", "name"), EVERY)
def test_the_function_of_a_row_takes_the_inputs_of_its_point_and_the_options_of_the_row(point: str, name: str) -> None:
    row = POINTS[point].methods[name]
    if row.function:
        signature = inspect.signature(load_target(row.function, point))
        signature.bind(*POINTS[point].inputs, **dict.fromkeys(row.options.model_fields))


def test_a_field_of_few_names_has_those_of_its_rows() -> None:
    fields = AlgorithmConfig.model_fields
    for field, point in (
        (fields["old_logprobs"], "old_logprobs"),
        (fields["update_scale"], "update_scale"),
        (ReplayConfig.model_fields["by"], "replay"),
    ):
        assert get_args(field.annotation) == tuple(POINTS[point].methods)
