"""Starts and stops a real SGLang server on a CPU, for tests and measurements. Only HTTP leads into it."""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import httpx

from rollmesh.runtime.addresses import free_port

# A start is 25 CPU seconds of imports in three processes, 10 of them if they are forks; minutes on busy cores.
START_SECONDS = 600.0

CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # With a thread per core the matrix products of a tiny model spend their time waiting for each other.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "SGLANG_TIMEOUT_KEEP_ALIVE": "75",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
# dtype: `auto` would serve a float32 checkpoint in float16. attention: the default on x86 wants instructions for AMX.
# sleep: an idle scheduler would spin on a core of its own.
CPU_ARGUMENTS = ("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--sleep-on-idle")

FORKING = {"PYTHONPATH": str(Path(__file__).with_name("forking"))}
"""Environment of a server whose processes are forks: less than half of the CPU time of a start."""
UNPINNED = {"PYTHONPATH": str(Path(__file__).with_name("unpinned"))}
"""Environment of a server with adapters on a CPU, whose processes are forks too."""

_PR_SET_PDEATHSIG = 1


class ServerFailed(Exception):
    """The server did not come up; the text ends with the last lines of its log."""


class SglangServer:
    """One server process group. ``start()`` returns when it takes requests; ``stop()`` leaves nothing of it behind."""

    def __init__(
        self,
        python: Path,
        model: Path,
        log: Path,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] = FORKING,
    ) -> None:
        self.python, self.model, self.log = python, model, log
        self.environment = environment
        self.arguments = tuple(arguments)
        self.port = 0
        self.start_seconds = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Of the main process, which is also the id of its group."""
        assert self._process is not None
        return self._process.pid

    def start(self, deadline_seconds: float = START_SECONDS) -> None:
        """Start the server and wait until /ready says 200; raises ServerFailed, with nothing left running."""
        self.port = free_port()
        started = time.monotonic()
        with self.log.open("ab") as log:
            self._process = self._launch(log)
        try:
            self._wait_ready(started + deadline_seconds)
        except BaseException:
            self.stop()
            raise
        self.start_seconds = time.monotonic() - started

    def stop(self) -> None:
        """Kill the whole process group at once: a test server has nothing to save."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log_tail(self, lines: int = 25) -> str:
        """The last lines of the log that say something: a dying server ends with hundreds about leaked objects."""
        text = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join([line for line in text if "leaked" not in line and "nanobind" not in line][-lines:])

    def _launch(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        command = [str(self.python), "-m", "sglang.launch_server", "--model-path", str(self.model)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), *CPU_ARGUMENTS, *self.arguments]
        environment = {**os.environ, **CPU_ENVIRONMENT, **self.environment}
        libc = ctypes.CDLL(None)
        # A killed test run takes its server along (its children watch their parent in the same way).
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )

    def _wait_ready(self, deadline: float) -> None:
        with httpx.Client(base_url=self.url, timeout=5.0) as client:
            while time.monotonic() < deadline:
                if not self.alive():
                    raise ServerFailed(f"the SGLang server ended as it started:\n{self.log_tail()}")
                with contextlib.suppress(httpx.TransportError):
                    if client.get("/ready").status_code == 200:
                        return
                time.sleep(0.2)
        raise ServerFailed(f"the SGLang server is not ready in time:\n{self.log_tail()}")


@contextlib.contextmanager
def running_server(
    python: Path, model: Path, log: Path, arguments: Sequence[str] = (), environment: Mapping[str, str] = FORKING
) -> Iterator[SglangServer]:
    """A started server for the length of a ``with`` block."""
    server = SglangServer(python, model, log, arguments, environment)
    server.start()
    try:
        yield server
    finally:
        server.stop()
