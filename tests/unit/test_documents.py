"""README, docs and examples name files, links, classes and settings that exist."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from rollmesh.config import RunConfig
from rollmesh.config.sft_config import SftConfig

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "services" / "rollmesh"
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "examples/README.md", "helm/rollmesh/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
MARK = "docs/architecture.md: The staleness bound"


def test_links_lead_to_files_and_headings() -> None:
    for file, link in found_in_documents(r"\]\(([^)\s]+)\)"):
        if link.startswith(("http://", "https://")):
            continue
        name, _, heading = link.partition("#")
        target = (file.parent / name).resolve() if name else file
        assert target.exists(), (file, link)
        if heading:
            assert heading in headings(target), (file, link)


def test_paths_exist() -> None:
    path_like = r"`((?:[\w.-]+/)+(?:[\w.-]+\.(?:py|lua|md|yaml|yml|txt|sh|proto|tpl|json|js))?)`"
    assert [(file, path) for file, path in found_in_documents(path_like) if not exists(path)] == []


def test_classes_exist() -> None:
    words = set(re.findall(r"\w+", source()))
    names = found_in_documents(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)+)`")
    assert [(file, name) for file, name in names if name not in words] == []


def test_settings_exist() -> None:
    for file, setting in found_in_documents(r"`([a-z]+(?:\.[a-z_]+)+)\b"):
        package = exists(f"{setting.replace('.', '/')}/") or setting in FILES_OF_THE_README
        if setting.split(".")[0] in RunConfig.model_fields and not package:
            assert known_setting(setting) or chart_value(setting), (file, setting)


def test_the_table_of_changes_has_fifteen_rows_of_existing_files_and_names_its_tests() -> None:
    rows = list(table("docs/contributing.md", "## Where do I change X"))
    assert len(rows) >= 15
    for change, files, tests in rows:
        named = re.findall(r"`([\w./-]+/[\w./-]*|[\w-]+\.md)`", files + tests)
        assert len(named) >= 2, change
        assert all(exists(path) for path in named), change
        assert all(path.startswith("tests/") for path in re.findall(r"`([^`]+)`", tests)), change


def test_every_place_that_enforces_the_staleness_bound_exists_and_names_the_section() -> None:
    listed: dict[str, set[str]] = {}
    for file, function, _ in table("docs/architecture.md", "## The staleness bound"):
        listed.setdefault(file.strip("`"), set()).add(function.strip("`"))

    judge = ROOT / "tests" / "chaos" / "judge"
    files = (*PACKAGE.rglob("*"), *judge.iterdir())
    found = [p for p in files if p.suffix in (".py", ".lua") and MARK in p.read_text()]
    names = {p.relative_to(ROOT if p.is_relative_to(judge) else PACKAGE).as_posix(): p for p in found}
    assert {name: set(marked(path)) for name, path in names.items()} == listed


def marked(file: Path) -> Iterator[str]:
    """Names of the functions whose body has the comment; an empty name for the top level of a script."""
    text = file.read_text()
    if file.suffix == ".lua":
        for part in re.split(r"^(?=local function |end$)", text, flags=re.MULTILINE):
            name = re.match(r"local function (\w+)", part)
            if MARK in part:
                yield name.group(1) if name else ""
        return
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if any(MARK in line for line in lines[node.lineno : node.end_lineno]):
            yield node.name


def table(document: str, heading: str) -> Iterator[list[str]]:
    """Cells of every row of the first table below a heading."""
    section = (ROOT / document).read_text().partition(f"{heading}\n")[2].partition("\n## ")[0]
    for row in re.findall(r"^\| (.*) \|$", section, re.MULTILINE)[1:]:
        yield [cell.strip() for cell in row.split("|")]


def found_in_documents(pattern: str) -> Iterator[tuple[Path, str]]:
    """Every match of the pattern's group, with its document."""
    return ((file, found) for file in DOCUMENTS for found in re.findall(pattern, file.read_text()))


def exists(path: str) -> bool:
    """Tell whether a path of a document exists, from the root of the repository, the package or the chart."""
    return any((base / path).exists() for base in (ROOT, PACKAGE, ROOT / "helm" / "rollmesh", ROOT / "docs")) or any(
        path.startswith(folder) for folder in RUN_FOLDER
    )


FILES_OF_THE_README = ("data.jsonl",)

RUN_FOLDER = ("logs/", "states/", "batches/", "policies/", "scrape/", "redis/", "runs/", "fingerprints/", "module/")
"""Folders of a run, not of the repository."""


def headings(file: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def known_setting(path: str) -> bool:
    """Tell whether a dotted name leads to a field of a run file, or of one of ``rollmesh sft``."""
    return any(leads_to_a_field(model, path) for model in (RunConfig, SftConfig))


def leads_to_a_field(model: type[BaseModel] | None, path: str) -> bool:
    for part in path.split("."):
        if model is None:
            return True  # below a field of several shapes
        if part not in model.model_fields:
            return False
        kind = model.model_fields[part].annotation
        model = kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
    return True


def chart_value(path: str) -> bool:
    """Tell whether a dotted name leads to a value of the chart, whose value ``run`` is a run file."""
    if path.startswith("run."):
        return known_setting(path.removeprefix("run."))
    found: Any = chart_values()
    for name in path.split("."):
        if not isinstance(found, dict) or name not in found:
            return False
        found = found[name]
    return True


@cache
def chart_values() -> Any:
    """Return the chart's default values."""
    return yaml.safe_load((ROOT / "helm" / "rollmesh" / "values.yaml").read_text())


@cache
def source() -> str:
    """Text of the program, the chart and the contract."""
    folders = (PACKAGE, ROOT / "helm", ROOT / "proto", ROOT / "deploy")
    kinds = {".py", ".yaml", ".tpl", ".proto"}
    return "\n".join(p.read_text() for folder in folders for p in folder.rglob("*") if p.suffix in kinds)
