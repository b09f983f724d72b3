"""Commands as processes: Ctrl-C in their first second, and nohup."""

from __future__ import annotations

import signal
import subprocess
import sys
import tomllib
from pathlib import Path


def test_ctrl_c_while_the_commands_are_imported_ends_the_process_without_a_trace() -> None:
    """The moment is chosen by what is imported: pydantic comes long before the last command."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    module, _, function = project["project"]["scripts"]["rollmesh"].partition(":")
    # A shell starts what it puts in the background with SIGINT ignored, and children inherit that.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    script = f"{heard}; from {module} import {function}; {function}()"
    # With a pipe this small the imports cannot run ahead of the signal.
    with subprocess.Popen(
        [sys.executable, "-X", "importtime", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pipesize=4096,
    ) as process:
        assert process.stderr is not None
        assert any(line.endswith(" pydantic.version\n") for line in process.stderr)
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert "Traceback" not in rest


def test_a_run_under_nohup_outlives_its_terminal() -> None:
    script = """
import asyncio, os, signal
from rollmesh.cli.common import shutdown_event

async def main():
    shutdown = shutdown_event()
    os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.sleep(0)
    print("alive" if not shutdown.is_set() else "stopped")

asyncio.run(main())
"""
    command = ["nohup", sys.executable, "-c", script]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout == "alive\n"
