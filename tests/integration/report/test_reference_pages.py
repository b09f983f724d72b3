"""The pages of docs/reference are those of the code, and their examples work."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from docs.build.page_text import write_pages
from docs.build.reference import FOLDER, reference_pages
from docs.build.verifier_examples import VERIFIER_EXAMPLES
from rollmesh.config import RunConfig
from rollmesh.config.load import validate_run_config
from rollmesh.tasks.sandbox.command import Sandbox
from rollmesh.tasks.verifiers.verifier_protocol import build_verifier, checked_reward

DOCS = Path(__file__).parents[3] / "docs"
MINIMAL = {"name": "page", "folder": "runs/page", "model": {"path": "recipe:countdown"}}


def test_the_committed_pages_are_those_of_the_code() -> None:
    pages = reference_pages()
    remedy = "run: python -m docs.build.reference"
    assert {file.name for file in (DOCS / FOLDER).iterdir()} == set(pages), remedy
    for name, text in pages.items():
        assert (DOCS / FOLDER / name).read_text() == text, f"docs/{FOLDER}/{name}: {remedy}"


def test_a_page_of_a_former_point_is_deleted(tmp_path: Path) -> None:
    (tmp_path / "former.md").write_text("")
    write_pages({"new.md": "text", "pictures/new.svg": "<svg/>"}, tmp_path, only="*.md")
    assert {file.name for file in tmp_path.rglob("*.*")} == {"new.md", "new.svg"}


def test_every_field_of_the_run_file_has_a_row_with_a_meaning() -> None:
    text = (DOCS / FOLDER / "run-file.md").read_text()
    sections = dict(re.findall(r"^## ([\w.]+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    for path, name in fields(RunConfig):
        rows = re.findall(rf"^\| `{name}` \|.*\| ([^|\s][^|]*) \|$", sections.get(path, text), re.MULTILINE)
        assert rows, f"{path}.{name}"


def test_every_row_of_a_table_has_as_many_cells_as_its_heading() -> None:
    for file in (DOCS / FOLDER).iterdir():
        for table in re.findall(r"(?:^\|.*\n)+", file.read_text(), re.MULTILINE):
            assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1, (file.name, table)


@pytest.mark.parametrize("name", VERIFIER_EXAMPLES)
def test_the_example_of_a_verifier_has_the_reward_of_the_page(name: str) -> None:
    example = VERIFIER_EXAMPLES[name]
    if name == "python_code" and (reason := Sandbox.unsafe_reason()):
        pytest.skip(reason)
    verifier = build_verifier(name, example.options)
    if example.reward is not None:
        assert checked_reward(verifier.verify(example.response, example.metadata), name).value == example.reward


def test_the_verifier_of_the_examples_pays_for_a_short_right_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS.parent / "examples")
    verifier = build_verifier("own_verifier:ShortAnswer", {"longest": 100})
    metadata = {"answer": 4, "prompt": "2 + 2"}
    values = [
        checked_reward(verifier.verify(text, metadata), "own").value
        for text in ("4", "5", "2 + 2 = 4", "x" * 200 + "4")
    ]
    assert values == [pytest.approx(1.099), 0.0, 1.0, 1.0]
    assert verifier.needs_prompt  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", ["verifiers", "sources", "environments"])
def test_the_examples_of_a_page_are_parts_of_a_valid_run_file(page: str) -> None:
    parts = re.findall(r"^```yaml\n(.*?)^```$", (DOCS / FOLDER / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL)
    assert parts
    for part in parts:
        validate_run_config({**MINIMAL, **yaml.safe_load(part)}, part)


def fields(section: type[BaseModel], path: str = "") -> Iterator[tuple[str, str]]:
    """Every field that is no section, with the dotted name of its section."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from fields(kind, f"{path}.{name}" if path else name)
        else:
            yield path, name
