"""Every alert has a runbook and every runbook an alert; what they tell people to type exists."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

import click
import pytest
import typer.main

from rollmesh.cli.main import app
from rollmesh.rollout.rollout_metrics import RolloutMetrics
from rollmesh.runtime.metrics import Metrics
from rollmesh.store.queue_types import WASTE_REASONS

from .rule_files import ROOT, RUNBOOKS, alerts, code_blocks, unknown_series

FILES = sorted(RUNBOOKS.glob("*.md"))
SECTIONS = ["What it means", "What to look at", "What to do", "When to ignore it"]
SHELL = ("rollmesh ", "grep ", "tail ", "redis-cli ", "kubectl ", "df ", "du ", "ls ")
by_name = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def test_alerts_and_runbooks_belong_to_each_other() -> None:
    assert {file.stem for file in FILES} == set(alerts())


@by_name
def test_a_runbook_has_all_its_parts(file: Path) -> None:
    text = file.read_text()
    assert text.startswith(f"# {file.stem}\n")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == SECTIONS
    assert f"Severity: {alerts()[file.stem]['labels']['severity']}." in text
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert (file.parent / target.partition("#")[0]).exists(), target


@by_name
def test_queries_in_a_runbook_can_be_asked(file: Path) -> None:
    queries = [line for line in lines(file) if not line.startswith(SHELL)]
    assert queries or "rollmesh" in file.read_text()
    for query in queries:
        assert not unknown_series(query), query
        assert query.count('run="RUN"') == query.count('namespace="NAMESPACE",run="RUN"'), "of one namespace"


@by_name
def test_commands_in_a_runbook_exist(file: Path) -> None:
    text = file.read_text()
    shell = [line for line in lines(file) if line.startswith("rollmesh ")]
    for command in shell + re.findall(r"`(rollmesh [^`]+)`", text):
        assert known_command(command.split()[1:]), command
    for pattern in re.findall(r"grep (?:-\w+ )?'?([a-z_|]{4,})'? ", text):
        for event in pattern.split("|"):
            assert event == "error" or f'"{event}"' in code(), f"no service logs {event}"


def test_the_reasons_in_the_goodput_runbook_are_counted_as_such() -> None:
    metrics = Metrics("rollout")
    RolloutMetrics(metrics)
    given_up = [
        sample.labels["reason"]
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "rollmesh_rollout_trajectories_dropped_total"
    ]
    text = (RUNBOOKS / "GoodputLow.md").read_text()
    named = [
        name for words in re.findall(r"^\* (`[^:]+):", text, re.MULTILINE) for name in re.findall("`(.*?)`", words)
    ]
    assert "taken_back" in given_up and len(named) > 4
    for name in named:
        assert fnmatch.filter([*WASTE_REASONS, *given_up], name), name
    explained = re.findall(r"`([a-z_*]+)`", text)
    for reason in WASTE_REASONS:
        assert any(fnmatch.fnmatch(reason, name) for name in explained), f"the runbook does not explain {reason}"


def lines(file: Path) -> list[str]:
    """Every line of the code blocks, without comments."""
    text = file.read_text()
    return [
        part for block in code_blocks(text) for line in block.splitlines() if (part := line.split("  #")[0].strip())
    ]


def known_command(words: list[str]) -> bool:
    command: click.Command = typer.main.get_command(app)
    for word in words:
        # Not isinstance: typer may bring a click of its own.
        commands = getattr(command, "commands", None)
        if commands is None:
            options = {name for parameter in command.params for name in parameter.opts}
            return all(word.split("=")[0] in options for word in words if word.startswith("--"))
        if word not in commands:
            return False
        command = commands[word]
    return True


_CODE: list[str] = []


def code() -> str:
    if not _CODE:
        _CODE.append("\n".join(file.read_text() for file in (ROOT / "services" / "rollmesh").rglob("*.py")))
    return _CODE[0]
