"""The contract: linted, never broken against what was published, and published entirely."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BUF = Path(sys.executable).parent / "buf"
PUBLISHED = "proto/published.binpb"
"""Image of the contract as others may have built against it; ``make publish-contract`` writes it."""


def buf(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BUF, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_protos_pass_buf_lint() -> None:
    done = buf("lint", "proto")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_protos_break_nothing_that_was_published() -> None:
    done = buf("breaking", "proto", "--against", PUBLISHED)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_field_of_the_protos_is_published_and_so_protected() -> None:
    # The other way round: what is in the protos and not in the published image would be a removal.
    done = buf("breaking", PUBLISHED, "--against", "proto", "--config", "proto/buf.yaml")
    assert done.returncode == 0, f"run make publish-contract and commit {PUBLISHED}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("trajectory", "string group_id = 2;", "string group_id = 99;"),
        ("trajectory", "string group_id = 2;", ""),
        ("generation_service", "rpc Drain(DrainRequest) returns (DrainResponse);", ""),
    ],
    ids=["renumbered", "removed", "rpc"],
)
def test_a_change_that_breaks_others_is_caught(tmp_path: Path, name: str, old: str, new: str) -> None:
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    file = tmp_path / f"proto/rollmesh/v1/{name}.proto"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    done = buf("breaking", str(tmp_path / "proto"), "--against", PUBLISHED)
    assert done.returncode != 0
    assert old.split()[1].split("(")[0] in done.stdout


def test_an_unpublished_new_field_is_caught(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    file = tmp_path / "proto/rollmesh/v1/trajectory.proto"
    file.write_text(file.read_text() + "\n// A thing.\nmessage Thing {\n  // Its name.\n  string name = 1;\n}\n")
    done = buf("breaking", PUBLISHED, "--against", str(tmp_path / "proto"), "--config", "proto/buf.yaml")
    assert done.returncode != 0
    assert "Thing" in done.stdout
