"""Command ``rollmesh methods``: every method of the curriculum and the trainer with options and deviations."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import typer

from rollmesh.config.advantage_methods import ADVANTAGE_METHODS
from rollmesh.config.budget_methods import BUDGET_METHODS
from rollmesh.config.loss_methods import LOSS_METHODS
from rollmesh.config.mask_methods import MASK_METHODS
from rollmesh.config.methods import Method
from rollmesh.config.old_logprob_methods import OLD_LOGPROB_METHODS
from rollmesh.config.planner_methods import PLANNER_METHODS
from rollmesh.config.recipes import recipe_file
from rollmesh.config.replay_methods import REPLAY_METHODS
from rollmesh.config.sampler_methods import SAMPLER_METHODS
from rollmesh.config.shaper_methods import SHAPER_METHODS
from rollmesh.config.update_scales import UPDATE_SCALES
from rollmesh.config.yaml_text import parse_yaml

POINTS: Mapping[str, Mapping[str, Method]] = MappingProxyType(
    {
        "sampler": SAMPLER_METHODS,
        "planner": PLANNER_METHODS,
        "group_shaper": SHAPER_METHODS,
        "budget": BUDGET_METHODS,
        "advantage": ADVANTAGE_METHODS,
        "loss": LOSS_METHODS,
        "masks": MASK_METHODS,
        "old_logprobs": OLD_LOGPROB_METHODS,
        "update_scale": UPDATE_SCALES,
        "replay": REPLAY_METHODS,
    }
)
"""Methods by the field of ``curriculum`` or ``trainer.algorithm`` that names them; budget is its two budgets,
and replay is ``trainer.replay``."""


def methods() -> None:
    """Print the methods of `curriculum`, `trainer.algorithm` and `trainer.replay`: options, source, deviation.

    Those of `curriculum`, advantage, loss and masks may also be `module:function` of your code.

    Example: `rollmesh methods`
    """
    for point, found in POINTS.items():
        for name, method in found.items():
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
    text = recipe_file("countdown", "methods.yaml").read_text(encoding="utf-8")
    table: Mapping[str, Mapping[str, Mapping[str, Any]]] = parse_yaml(text)
    return {
        f"{field.removesuffix('.by').rpartition('.')[2]}/{name}": [
            f"{key}={json.dumps(value)}" for key, value in ({field: name} | dict(others)).items()
        ]
        for field, methods in table.items()
        for name, others in methods.items()
    }
