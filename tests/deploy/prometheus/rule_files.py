"""The shipped rule files and dashboards as data, and what their expressions read."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import yaml

from docs.build.metrics import service_metrics

ROOT = Path(__file__).parents[3]
FILES = ROOT / "helm" / "rollmesh" / "files"
RECORDING = FILES / "prometheus" / "recording.yaml"
ALERTS = FILES / "prometheus" / "alerts.yaml"
RUNBOOKS = ROOT / "docs" / "runbooks"
RULE_TESTS = sorted((Path(__file__).parent / "rules").glob("*_test.yaml"))
OF_PROMETHEUS = {"up"}
"""Series that Prometheus makes itself."""


def rules(file: Path) -> list[dict[str, Any]]:
    """Every rule of a file."""
    return [rule for group in yaml.safe_load(file.read_text())["groups"] for rule in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    """Alerting rules by name."""
    return {rule["alert"]: rule for rule in rules(ALERTS)}


def recorded() -> dict[str, str]:
    """Expressions of the recording rules by name."""
    return {rule["record"]: rule["expr"] for rule in rules(RECORDING)}


def read_series(expression: str) -> set[str]:
    """Names of the series that an expression reads; a selector over names counts as its regular expression."""
    names: set[str] = set()

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.MatrixSelector):
            node = node.vector_selector
        if isinstance(node, promql_parser.VectorSelector):
            named = [m.value for m in node.matchers.matchers if m.name == "__name__"]
            names.add(node.name or named[0])

    promql_parser.walk(promql_parser.parse(expression), pre_visit=visit)
    return names


def exported_series() -> set[str]:
    """Names of every series of every service, histograms' and those of the process collector included."""
    names = {"process_open_fds", "process_max_fds", "process_start_time_seconds"}
    names |= {"process_cpu_seconds_total", "process_resident_memory_bytes"}
    for families in service_metrics().values():
        for family in families:
            if family.type == "counter":
                names.add(f"{family.name}_total")
            elif family.type == "histogram":
                names |= {f"{family.name}_{part}" for part in ("bucket", "sum", "count")}
            else:
                names.add(family.name)
    return names


def unknown_series(expression: str) -> set[str]:
    """Return the series that an expression reads and no service or rule exports."""
    known = exported_series() | set(recorded()) | OF_PROMETHEUS
    return {name for name in read_series(expression) if not any(re.fullmatch(name, one) for one in known)}


def exported_values() -> dict[str, set[str]]:
    """Values of every label that exist before anything has happened, over all metrics; and the names of services."""
    values: dict[str, set[str]] = {"service": set(service_metrics())}
    for families in service_metrics().values():
        for sample in (sample for family in families for sample in family.samples):
            for label, value in sample.labels.items():
                values.setdefault(label, set()).add(value)
    return values


def asked_values(expression: str) -> Iterator[tuple[str, str]]:
    """(label, value) of everything that the selectors of an expression compare with, alternatives one by one."""
    found: list[tuple[str, str]] = []

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.MatrixSelector):
            node = node.vector_selector
        if isinstance(node, promql_parser.VectorSelector):
            found.extend((m.name, value) for m in node.matchers.matchers for value in m.value.split("|"))

    promql_parser.walk(promql_parser.parse(expression), pre_visit=visit)
    yield from found


def code_blocks(text: str) -> Iterator[str]:
    """Contents of the fenced blocks of a Markdown file."""
    yield from (block.group(1) for block in re.finditer(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
