"""Files of a run folder: growing JSON lines, and the lock with its holder."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from rollmesh.runtime.growing_files import JsonLinesTail
from rollmesh.runtime.locks import LOCK_FILE, lock_holder, lock_text, started_by_launcher


def _lines(*steps: int, note: str = "") -> bytes:
    return b"".join(json.dumps({"train_step": step, "note": note}).encode() + b"\n" for step in steps)


def _replace(file: Path, content: bytes) -> None:
    """As a restarted trainer tidies its records: a new file under the old name."""
    temporary = file.with_name("tidied")
    temporary.write_bytes(content)
    temporary.replace(file)


def test_a_tail_reads_each_complete_line_once(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    tail = JsonLinesTail(file)
    assert tail.read() == []
    file.write_bytes(_lines(0, 1) + b'{"train_')
    assert [line["train_step"] for line in tail.read()] == [0, 1]
    assert tail.read() == []
    file.write_bytes(_lines(0, 1, 2))
    assert [line["train_step"] for line in tail.read()] == [2]


@pytest.mark.parametrize(
    ("write", "new"),
    [
        (_replace, _lines(0, 1, 2, 3, note="replayed after a kill, so lines differ in length")),
        (_replace, _lines(0, 1)),
        (Path.write_bytes, _lines(0, 1, 2, 3, note="of another length")),
    ],
)
def test_a_tail_starts_over_when_the_file_was_replaced_or_rewritten(
    tmp_path: Path, write: Callable[[Path, bytes], object], new: bytes
) -> None:
    file = tmp_path / "metrics.jsonl"
    tail = JsonLinesTail(file)
    file.write_bytes(_lines(0, 1, 2, note="before"))
    tail.read()
    write(file, new)
    assert [line["train_step"] for line in tail.read()] == list(range(new.count(b"\n")))


def test_a_tail_reports_a_missing_and_a_restarted_file(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    tail = JsonLinesTail(file)
    seen = []

    def read() -> None:
        seen.append(([line["train_step"] for line in tail.read()], tail.exists, tail.from_start))

    read()
    file.write_bytes(_lines(0, 1))
    read()
    read()
    _replace(file, _lines(0, 1, 2, note="longer"))
    read()
    tail.rewind()
    read()
    assert seen == [
        ([], False, False),
        ([0, 1], True, True),
        ([], True, False),
        ([0, 1, 2], True, True),
        ([0, 1, 2], True, True),
    ]


def test_a_tail_skips_what_is_no_json_object(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(_lines(0) + b"\n{torn\n[1]\n\xff\xfe\n" + _lines(1))
    assert [line["train_step"] for line in JsonLinesTail(file).read()] == [0, 1]


def test_a_tail_reads_a_long_history_part_by_part(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(_lines(*range(100)))
    tail = JsonLinesTail(file, most_bytes=300)
    parts = [tail.read() for _ in range(20)]
    assert all(len(part) < 20 for part in parts)
    assert [line["train_step"] for part in parts for line in part] == list(range(100))


def test_a_line_longer_than_a_part_is_skipped_and_the_next_ones_are_read(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    tail = JsonLinesTail(file, most_bytes=200)
    file.write_bytes(_lines(0) + _lines(1, note="x" * 1000) + _lines(2))
    assert [line["train_step"] for _ in range(4) for line in tail.read()] == [0, 2]
    # A long line that is still being written is looked at again, not lost with what follows it.
    with file.open("ab") as handle:
        handle.write(_lines(3, note="y" * 500)[:-1])
    assert tail.read() == []
    with file.open("ab") as handle:
        handle.write(b"\n" + _lines(4))
    assert [line["train_step"] for _ in range(3) for line in tail.read()] == [4]


def test_the_holder_is_read_back_from_what_it_writes(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text(lock_text())
    holder = lock_holder(tmp_path)
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
