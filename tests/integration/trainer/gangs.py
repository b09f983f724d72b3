"""Starting a script as the two ranks of a gang, without torchrun's own processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

WORLD = 2


def run_gang(script: str, *arguments: str | Path) -> list[str]:
    """Run ``tests/integration/trainer/<script>.py`` as every rank; returns what each printed, in rank order."""
    common = {
        **os.environ,
        "WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", f"tests.integration.trainer.{script}", *map(str, arguments)]
    ranks = [
        subprocess.Popen(
            command,
            cwd=Path(__file__).parents[3],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(outputs)
    return outputs


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
