"""Command ``rollmesh methods``: every method of the curriculum and the trainer with options and deviations."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import typer

from rollmesh.config.curriculum import CURRICULUM_POINTS
from rollmesh.config.methods import Method, Point
from rollmesh.config.trainer import TRAINER_POINTS

POINTS: Mapping[str, Point[Any]] = MappingProxyType({**CURRICULUM_POINTS, **TRAINER_POINTS})
"""Points by the field of ``curriculum`` or ``trainer.algorithm`` that names a method; budget is its two budgets, and
replay is ``trainer.replay``."""


def methods() -> None:
    """Print the methods of `curriculum`, `trainer.algorithm` and `trainer.replay`: options, source, deviation.

    Those of `curriculum`, advantage, loss and masks may also be `module:function` of your code.

    Example: `rollmesh methods`
    """
    for point, found in POINTS.items():
        for name, method in found.methods.items():
            typer.secho(f"{point}: {name}", bold=True)
            if options := option_defaults(method):
                typer.echo(f"  options: {', '.join(options)}")
            typer.echo(f"  source: {method.source}")
            if method.deviation:
                typer.echo(f"  differs: {method.deviation}")


def option_defaults(method: Method) -> list[str]:
    """Return the options of a method, each with its default or ``required``."""
    return [
        f"{name} ({'required' if field.is_required() else json.dumps(field.get_default(call_default_factory=True))})"
        for name, field in method.options.model_fields.items()
    ]


def method_settings() -> dict[str, list[str]]:
    """Return the ``a.b=c`` overrides with which the demo trains each method, by ``point/method``."""
    return {
        f"{point.field.removesuffix('.by').rpartition('.')[2]}/{name}": [
            f"{field}={json.dumps(value)}" for field, value in point.example(name).items()
        ]
        for point in POINTS.values()
        for name in point.methods
    }
