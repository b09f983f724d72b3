"""The published contract: linted, and never broken against the last commit that the branch started from."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BUF = Path(sys.executable).parent / "buf"


def buf(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BUF, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_protos_pass_buf_lint() -> None:
    done = buf("lint", "proto")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_protos_break_nothing_against_the_main_branch() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: nothing to compare with")
    done = buf("breaking", "proto", "--against", ".git#ref=HEAD,subdir=proto")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_renumbered_field_is_caught_by_the_breaking_check(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    file = tmp_path / "proto/rollmesh/v1/trajectory.proto"
    text = file.read_text()
    assert "string group_id = 2;" in text
    file.write_text(text.replace("string group_id = 2;", "string group_id = 99;", 1))
    done = buf("breaking", str(tmp_path / "proto"), "--against", str(ROOT / "proto"))
    assert done.returncode != 0
    assert "group_id" in done.stdout
