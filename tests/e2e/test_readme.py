"""The commands of the README work as written."""

import os
import re
import subprocess
import sys
from pathlib import Path

from typer.main import get_command

from rollmesh.cli.main import app

from .conftest import WAIT_SECONDS

README = Path(__file__).parents[2] / "README.md"
SHELL_BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED_BLOCK = re.compile(r"^`([\w.]+)`\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_own_task_of_the_readme_trains_as_written(tmp_path: Path) -> None:
    text = README.read_text()
    blocks = dict(NAMED_BLOCK.findall(text))
    assert set(blocks) == {"data.jsonl", "my_task.py", "run.yaml"}
    for name, content in blocks.items():
        (tmp_path / name).write_text(content)
    (command,) = [block for block in SHELL_BLOCK.findall(text) if "rollmesh up" in block]
    done = subprocess.run(
        ["bash", "-euc", command],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=2 * WAIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs/mine/report.html").exists()


def test_every_command_of_the_readme_exists_and_every_command_is_in_the_readme() -> None:
    table = README.read_text().partition("## Commands")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(?:rollmesh )?([a-z-]+)", "".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE))))
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert named == {name for name, command in commands.items() if not command.hidden}
