"""Run as a script by the tests: the trainer service on a disk that is full whenever a policy is marked as announced.

The second attempt finds room. Usage: full_marker_process.py RUN.yaml
"""

from __future__ import annotations

import errno
import runpy
from pathlib import Path

from rollmesh.checkpoints import durable, policies

_full: set[Path] = set()


def write_new_file(path: Path, data: bytes) -> None:
    if path.name == policies.ANNOUNCED_FILE and path not in _full:
        _full.add(path)
        raise OSError(errno.ENOSPC, "No space left on device", str(path))
    durable.write_new_file(path, data)


if __name__ == "__main__":
    policies.write_new_file = write_new_file
    runpy.run_path(str(Path(__file__).with_name("trainer_process.py")), run_name="__main__")
