"""The run files of examples/ load, pass the checks of `rollmesh config validate`, and match their data and values."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollmesh.config import load_run_config
from rollmesh.config.recipes import resolve_model
from rollmesh.preflight.run_checks import check_run
from rollmesh.tasks.verifiers.verifier_protocol import build_verifier

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
VALUES = sorted((ROOT / "examples" / "kubernetes").glob("*-values.yaml"))
TABLES = sorted((ROOT / "examples" / "data").glob("*.jsonl"))
WARM_START = ROOT / "examples" / "warm-start.yaml"  # of rollmesh sft: tests/integration/sft runs it
by_stem = pytest.mark.parametrize("file", [file for file in EXAMPLES if file != WARM_START], ids=lambda file: file.stem)


def rows(table: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in table.read_text().splitlines()]


def test_every_file_is_listed() -> None:
    text = (ROOT / "examples" / "README.md").read_text()
    linked = {link for link in re.findall(r"\]\(([\w./-]+)\)", text) if not link.startswith("../docs/")}
    programs = (ROOT / "examples").glob("*.py")
    assert linked == {path.relative_to(ROOT / "examples").as_posix() for path in (*EXAMPLES, *VALUES, *programs)}


@pytest.mark.parametrize(
    "file", [*EXAMPLES, *VALUES, *sorted((ROOT / "examples").glob("*agent.py"))], ids=lambda file: file.stem
)
def test_an_example_begins_with_its_purpose_its_command_and_the_first_changes(file: Path) -> None:
    purpose, command, changes, rest = file.read_text().split("\n", 3)
    assert purpose.startswith("# For ") and changes.startswith("# Change first: ")
    assert re.match(r"# Run(, .*)?: ", command) and not rest.startswith("#")
    for path in re.findall(r"examples/[\w./-]+\w", command):
        assert (ROOT / path).is_file(), path


@by_stem
def test_a_run_can_start_from_an_example(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the models and the SGLang of its machine: small models of the same context, a server at an address."""
    monkeypatch.chdir(ROOT)
    example = load_run_config(file, environ={})
    changes = []
    if example.model.path.startswith("/models/"):
        model = tmp_path / "model"
        shutil.copytree(resolve_model("recipe:countdown"), model)
        described = json.loads((model / "config.json").read_text())
        positions = {"max_position_embeddings": example.generator.max_context_tokens}
        (model / "config.json").write_text(json.dumps({**described, **positions}))
        changes.append(f"model.path={model}")
    server = "{url: 'http://127.0.0.1:30000'}"
    for name, teacher in example.teachers.items():
        changes.append(f"teachers.{name}.model={model if changes else 'recipe:countdown'}")
        changes += [f"teachers.{name}.sglang={server}"] if teacher.engine == "sglang" else []
    if example.generator.engine == "sglang":
        changes.append(f"generator.sglang={server}")

    found = check_run(load_run_config(file, changes, environ={}), tries_inputs=False)

    assert found.estimate.queue_bytes > 0
    assert sum(": 249,984 parameters; each of 1 processes" in note for note in found.notes) == len(example.teachers)
    assert example.folder == f"runs/{example.name}"


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.stem)
def test_a_table_has_twenty_rows_whose_answers_the_verifier_accepts(table: Path) -> None:
    verifier = build_verifier("numeric", {})
    found = rows(table)
    assert len(found) == 20 and len({row["prompt"] for row in found}) == 20
    for row in found:
        assert set(row) == {"prompt", "answer"}
        assert verifier.verify(f"2 + 2 is 4. The answer is {row['answer']}", {"answer": row["answer"]}) == 1


def test_the_values_describe_the_run_of_their_example() -> None:
    """The chart sets folders, addresses and replicas; the table is mounted at another path."""
    for file in VALUES:
        run: dict[str, Any] = yaml.safe_load(file.read_text())["run"]
        example: dict[str, Any] = yaml.safe_load(
            (ROOT / "examples" / f"{file.name.removesuffix('-values.yaml')}.yaml").read_text()
        )
        for section, fields in run.items():
            if not isinstance(fields, dict):
                assert fields == example[section], section
                continue
            for name, value in fields.items():
                wanted = example[section][name]
                if name == "source" and "path" in wanted:
                    wanted = {**wanted, "path": f"/data/{Path(wanted['path']).name}"}
                assert value == wanted, f"{file.name}: run.{section}.{name}"
