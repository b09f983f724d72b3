"""The blocks and commands of the README, and of the pages that it begins with, work as written."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pyarrow
import pytest
import yaml
from pyarrow import parquet
from typer.main import get_command

from rollmesh.cli.main import app
from rollmesh.config.recipes import resolve_model
from rollmesh.user_code import CODE_FOLDER

from .conftest import WAIT_SECONDS

ROOT = Path(__file__).parents[2]
COMMAND_PAGE = ROOT / "docs" / "commands.md"
TEXT = "\n".join(page.read_text() for page in (ROOT / "README.md", ROOT / "docs" / "own-model.md", COMMAND_PAGE))
SHELL_BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED_BLOCK = re.compile(r"^`([\w.]+)`\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OWN_TASK = ("data.jsonl", "my_task.py", "run.yaml")
GPU_RUN = "gsm8k.yaml"
COMMANDS: dict[str, click.Command] = get_command(app).commands  # type: ignore[attr-defined]


def typed(block: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A shell block as a reader types it, in a folder and without settings of this test run."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", CODE_FOLDER)}
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["bash", "-euc", block],
        cwd=folder,
        env={**kept, **path, **environment},
        capture_output=True,
        text=True,
        timeout=2 * WAIT_SECONDS,
        check=False,
    )


def shell_blocks(words: str) -> list[str]:
    return [block for block in SHELL_BLOCK.findall(TEXT) if words in block]


def named_blocks() -> dict[str, str]:
    blocks = dict(NAMED_BLOCK.findall(TEXT))
    assert set(blocks) == {*OWN_TASK, GPU_RUN}
    return blocks


def test_the_own_task_of_the_readme_trains_as_written(tmp_path: Path) -> None:
    blocks = named_blocks()
    for name in OWN_TASK:
        (tmp_path / name).write_text(blocks[name])
    (command,) = [block for block in shell_blocks("rollmesh up") if "init" not in block]
    assert command == "rollmesh up run.yaml\n", "no PYTHONPATH: the module beside the run file is found"
    done = typed(command, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs/mine/report.html").exists()


def test_the_starter_of_the_readme_is_written_and_valid_as_typed(tmp_path: Path) -> None:
    (block,) = shell_blocks("rollmesh init")
    before, last = block.removesuffix("\n").rsplit("\n", 1)
    assert last == "rollmesh up run.yaml", "test_starter_run.py trains it"
    done = typed(f"{before}\n{last.replace('up', 'config validate')} --set gateway.port=0", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run.yaml: valid" in done.stdout


def test_the_run_on_a_gpu_reads_what_its_commands_download(tmp_path: Path) -> None:
    """The run file as written, over a small model and rows of the same form in the places of the downloads."""
    (block,) = shell_blocks("hf download")
    folders = re.findall(r"hf download (\S+) .*--local-dir (\S+)", block)
    run: dict[str, Any] = yaml.safe_load(named_blocks()[GPU_RUN])
    path = run["data"]["source"]["path"]
    assert run["model"]["path"] == folders[0][1] and path.startswith(f"{folders[1][1]}/")
    model, rows = tmp_path / folders[0][1], tmp_path / path
    shutil.copytree(resolve_model("recipe:countdown"), model)
    described = json.loads((model / "config.json").read_text())
    longer = {"max_position_embeddings": run["generator"]["max_context_tokens"]}
    (model / "config.json").write_text(json.dumps({**described, **longer}))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '' if enable_thinking }}"
    (model / "chat_template.jinja").write_text(template)
    rows.parent.mkdir(parents=True)
    table = {"question": ["1 + 1", "1 + 2"], "answer": ["1 + 1 = 2\n#### 2", "1 + 2 = 3\n#### 3"]}
    parquet.write_table(pyarrow.table(table), rows)
    (tmp_path / GPU_RUN).write_text(named_blocks()[GPU_RUN])
    done = typed(f"rollmesh config validate {GPU_RUN} --set gateway.port=0", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{GPU_RUN}: valid" in done.stdout and "model: 249,984 parameters" in done.stdout


def test_the_table_of_memory_adds_up() -> None:
    rows = re.findall(r"^\| ([\d.]+) billion \| ([\d.]+) GB \| ([\d.]+) GB \| (\d+) MB \|$", TEXT, re.MULTILINE)
    # Qwen3: layers of the 0.6B, 1.7B, 4B and 8B, which have 8 key-value heads of 128, and hidden sizes of tied heads.
    for (count, trainer, weights, cache), layers, tied in zip(
        rows, (28, 28, 36, 36), (1024, 2048, 2560, 0), strict=True
    ):
        assert float(trainer) == pytest.approx(16 * float(count), rel=0.02)
        assert float(weights) == pytest.approx(2 * (float(count) + 151_936 * tied / 1e9), rel=0.03)
        assert int(cache) == round(2 * layers * 8 * 128 * 2 / 1000)


def test_version_extras_and_targets_of_the_readme_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"Version {project['version']}," in TEXT and f"[{project['license']}](LICENSE)" in TEXT
    extras = {extra for group in re.findall(r"\.\[([\w,]+)\]", TEXT) for extra in group.split(",")}
    assert "local" in extras and extras <= set(project["optional-dependencies"])
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"\bmake ([a-z-]+)", "".join(SHELL_BLOCK.findall(TEXT)))) <= set(targets)


def test_the_page_of_commands_has_every_command_and_no_other() -> None:
    rows = "".join(re.findall(r"^\| (.*?) \|", COMMAND_PAGE.read_text(), re.MULTILINE))
    named = set(re.findall(r"`(?:rollmesh )?([a-z-]+)", rows))
    assert named == {name for name, command in COMMANDS.items() if not command.hidden}


def test_every_option_that_the_readme_types_exists() -> None:
    checked = 0
    for words in typed_commands():
        command = COMMANDS[words[0]]
        if isinstance(command, click.Group) and len(words) > 1 and words[1] in command.commands:
            command = command.commands[words[1]]
        known = {option for parameter in command.params for option in parameter.opts}
        options = [word.partition("=")[0] for word in words if word.startswith("--")]
        assert set(options) <= known, words
        checked += len(options)
    assert checked >= 3


def typed_commands() -> Iterator[list[str]]:
    """The words after ``rollmesh`` of every command in code."""
    lines = "".join(SHELL_BLOCK.findall(TEXT)).splitlines()
    for code in (*re.findall(r"`(rollmesh [^`]+)`", TEXT), *(line for line in lines if line.startswith("rollmesh "))):
        yield code.split("#")[0].split()[1:]
