"""Every alert has a runbook and every runbook an alert; what they tell people to type exists."""

import fnmatch
import re

import click
import pytest
import typer.main

from rollmesh.cli.main import app
from rollmesh.rollout.rollout_metrics import RolloutMetrics
from rollmesh.runtime.metrics import Metrics
from rollmesh.store.queue_types import WASTE_REASONS

from .rule_files import ROOT, RUNBOOKS, alerts, code_blocks, unknown_series

PAGES = sorted(RUNBOOKS.glob("*.md"))
SECTIONS = {
    name: (page, text)
    for page in PAGES
    for name, text in re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page.read_text(), re.MULTILINE | re.DOTALL)
}
SHELL = ("rollmesh ", "grep ", "tail ", "redis-cli ", "kubectl ", "df ", "du ", "ls ")
by_name = pytest.mark.parametrize("name", sorted(SECTIONS))


def test_alerts_and_runbooks_belong_to_each_other() -> None:
    assert set(SECTIONS) == set(alerts())


@by_name
def test_a_runbook_has_all_its_parts(name: str) -> None:
    page, text = SECTIONS[name]
    assert text.startswith(f"\n{alerts()[name]['labels']['severity'].capitalize()}. ")
    assert re.findall(r"^\*\*([\w ]+)\.\*\*", text, re.MULTILINE) == ["Look at", "Do", "Ignore"]
    for target in re.findall(r"\]\(([^)]+)\)", text):
        file, _, anchor = target.partition("#")
        assert (page.parent / file).exists(), target
        assert not anchor or f"\n## {anchor}\n" in (page.parent / file if file else page).read_text().lower(), target


@by_name
def test_queries_in_a_runbook_can_be_asked(name: str) -> None:
    queries = [line for line in lines(name) if not line.startswith(SHELL)]
    assert queries or "rollmesh" in SECTIONS[name][1]
    for query in queries:
        assert not unknown_series(query), query
        assert query.count('run="RUN"') == query.count('namespace="NAMESPACE",run="RUN"'), "of one namespace"


@by_name
def test_commands_in_a_runbook_exist(name: str) -> None:
    text = SECTIONS[name][1]
    shell = [line for line in lines(name) if line.startswith("rollmesh ")]
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
    text = SECTIONS["GoodputLow"][1]
    named = [
        name for words in re.findall(r"^\* (`[^:]+):", text, re.MULTILINE) for name in re.findall("`(.*?)`", words)
    ]
    assert "taken_back" in given_up and len(named) > 4
    for name in named:
        assert fnmatch.filter([*WASTE_REASONS, *given_up], name), name
    explained = re.findall(r"`([a-z_*]+)`", text)
    for reason in WASTE_REASONS:
        assert any(fnmatch.fnmatch(reason, name) for name in explained), f"the runbook does not explain {reason}"


def lines(name: str) -> list[str]:
    """Every line of the code blocks of a runbook, without comments."""
    blocks = code_blocks(SECTIONS[name][1])
    return [part for block in blocks for line in block.splitlines() if (part := line.split("  #")[0].strip())]


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
