"""Help pages: every command has an example that its parser accepts, and no type of Python."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import rollmesh
from rollmesh.cli.main import app

ROOT: Any = get_command(app)


def commands(group: Any = ROOT, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every visible command with its words."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *path, name)
        elif not command.hidden:
            yield (*path, name), command


COMMANDS = dict(commands())


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_an_example_that_it_accepts(words: tuple[str, ...]) -> None:
    command = COMMANDS[words]
    line = re.search(r"Example: `rollmesh ([^`]+)`", command.help)
    assert line is not None, command.help
    typed = shlex.split(line[1])
    assert tuple(typed[: len(words)]) == words
    # Parsing alone: a wrong option or number of arguments is an error.
    command.make_context(words[-1], typed[len(words) :])


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_help_page_names_no_type_of_python_and_no_argument_in_double_brackets(words: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(app, [*words, "-h"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert not re.search(r"<(bool|int|float|path|str|list)|\{|list\[|\[\[", shown.stdout), shown.stdout
    assert "Show this message" in shown.stdout


def test_the_list_of_commands_begins_with_up_and_demo() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).stdout
    names = re.findall(r"│ ([a-z][a-z-]+)  ", shown)
    assert names[:2] == ["up", "demo"]
    assert {"config", "dead-letters"} < set(names) == set(ROOT.commands), "none is hidden"
    assert len(names) <= 24


def test_the_version_is_printed() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"rollmesh {rollmesh.__version__}\n"
