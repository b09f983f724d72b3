"""``rollmesh demo-methods``: short runs of the demo with every method."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from rollmesh.cli.common import SetOption, clear_errors
from rollmesh.cli.demo_runs import DemoRuns, print_count
from rollmesh.cli.up import InlineOption
from rollmesh.config.recipes import recipe_file
from rollmesh.config.yaml_text import parse_yaml
from rollmesh.errors import ConfigError
from rollmesh.report.console import run_console


def demo_methods(
    method: Annotated[
        list[str] | None, typer.Option("--method", help="Methods to run, as advantage/drpo; all by default.")
    ] = None,
    updates: Annotated[int, typer.Option(help="Train steps of each run.", min=2)] = 3,
    folder: Annotated[Path | None, typer.Option("--folder", help="Parent of the run folders.")] = None,
    set_: SetOption = None,
    inline: InlineOption = False,
) -> None:
    """Run the demo's task with every method of `rollmesh methods`, with the settings that go with it.

    Prints one row per method, with the traces of the method in its run, or "no effect". Exits with status 1 unless
    every run makes all its updates and its audit is green.

    Example: `rollmesh demo-methods --method advantage/drpo --inline`
    """
    from rollmesh.report.demo_results import methods_table
    from rollmesh.report.method_effects import effect_of, read_traces

    console = run_console()
    demos = DemoRuns(root=folder or Path("runs/demo-methods"), updates=updates, settings=set_ or (), inline=inline)
    with clear_errors():
        results = [
            replace(result, effect=effect_of(read_traces(demos.root / result.name), result.name))
            for result in demos.results(_chosen(method), console)
        ]
    console.print(methods_table(results))
    print_count(results, "methods", console)


def method_settings() -> dict[str, list[str]]:
    """Return the ``a.b=c`` overrides with which the demo runs each method, by ``point/method``."""
    text = recipe_file("countdown", "methods.yaml").read_text(encoding="utf-8")
    table: Mapping[str, Mapping[str, Mapping[str, Any]]] = parse_yaml(text)
    return {
        f"{field.removesuffix('.by').rpartition('.')[2]}/{name}": [
            f"{key}={json.dumps(value)}" for key, value in ({field: name} | dict(others)).items()
        ]
        for field, methods in table.items()
        for name, others in methods.items()
    }


def _chosen(names: Sequence[str] | None) -> dict[str, list[str]]:
    known = method_settings()
    if unknown := [name for name in names or () if name not in known]:
        raise ConfigError(f"--method {unknown[0]}: not a method of the demo; known: {', '.join(known)}")
    return {name: known[name] for name in names or known}
