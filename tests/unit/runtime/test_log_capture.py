"""Lines of libraries in the log of a service: clients that cause them must not fill the disk."""

from __future__ import annotations

import logging

import pytest

from rollmesh.runtime.logging import _LibraryLogHandler


def test_equal_lines_of_a_library_share_one_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.Logger("uvicorn.error")
    logger.addHandler(_LibraryLogHandler())
    for _ in range(1_000):
        logger.warning("Invalid HTTP request received.")
    logger.warning("another line")
    lines = capsys.readouterr().out.splitlines()
    # The loop takes milliseconds; on a machine that stalls, a second may begin in it.
    assert 2 <= len(lines) < 20
    assert "Invalid HTTP request" in lines[0] and "another line" in lines[-1]
