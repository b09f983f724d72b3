"""What the README tells a newcomer to type works as written."""

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
NAMED_BLOCK = re.compile(r"^`([\w.]+)`\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_own_task_of_the_readme_trains_as_written(tmp_path: Path) -> None:
    blocks = dict(NAMED_BLOCK.findall(README.read_text()))
    assert set(blocks) == {"data.jsonl", "my_task.py", "run.yaml"}
    for name, text in blocks.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "rollmesh.cli.main", "up", "run.yaml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ".", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs/mine/report.html").exists()
