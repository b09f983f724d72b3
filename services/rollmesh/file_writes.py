"""Writes whose errors name the file: a write to an open file that fails, as on a full disk, names none."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Name ``path`` in an error of the operating system within the block that names no file."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8; an error names it."""
    with writing(path):
        path.write_text(text, encoding="utf-8")
