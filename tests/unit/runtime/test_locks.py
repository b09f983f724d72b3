"""The lock of a run folder and its holder."""

import os
import socket
from pathlib import Path

import pytest

from rollmesh.runtime.locks import LOCK_FILE, lock_holder, lock_text, started_by_launcher


def test_the_holder_is_read_back_from_what_it_writes(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text(lock_text())
    holder = lock_holder(tmp_path)
    assert holder is not None
    assert (holder.pid, holder.host, holder.is_here) == (os.getpid(), socket.gethostname(), True)
    assert str(holder) == f"pid {os.getpid()} on {socket.gethostname()}"


@pytest.mark.parametrize("text", [None, "", "node-a", "x node-a"])
def test_a_lock_without_a_process_id_has_no_holder(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / LOCK_FILE).write_text(text)
    assert lock_holder(tmp_path) is None
    assert not started_by_launcher(tmp_path)


def test_a_process_is_started_by_a_launcher_of_its_own_host_only(tmp_path: Path) -> None:
    """On another host the same process id is another process."""
    here = socket.gethostname()
    expected = {
        f"{os.getpid()} {here}": True,
        f"{os.getppid()} {here}": True,
        str(os.getppid()): True,
        f"{os.getppid()} not-{here}": False,
    }
    for text, is_started in expected.items():
        (tmp_path / LOCK_FILE).write_text(text)
        assert started_by_launcher(tmp_path) is is_started, text
