"""A real OpenEnv server, with environments of the tests and the one that `openenv init` writes."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .environments import python_of

WORLDS = Path(__file__).parents[1] / "integration" / "environments" / "openenv_worlds.py"


class OpenEnvServer:
    """A server whose environments are at ``URL/hunt``, ``/claims``, ``/sums``, ``/desk`` and ``/echo``."""

    def __init__(self, folder: Path) -> None:
        self.python = python_of("openenv")
        self._written = folder / "echo_words"
        if not self._written.exists():
            command = [str(self.python), "-m", "openenv.cli", "init", "echo_words", "--output-dir", str(folder)]
            subprocess.run(command, check=True, capture_output=True, timeout=300)
        self.start(port=0)

    def start(self, port: int) -> None:
        """Start it on a port; 0 is any free one."""
        command = list(map(str, (self.python, WORLDS, self._written, port)))
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        with self.process.stdout as output:
            self.port = int(output.readline())
        self.url = f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        """End it at once, as kill -9 does."""
        self.process.kill()
        self.process.wait()


@contextmanager
def openenv_server(folder: Path) -> Iterator[OpenEnvServer]:
    """A server that ends with the block; the test is skipped where the package is not installed."""
    server = OpenEnvServer(folder)
    try:
        yield server
    finally:
        server.kill()
