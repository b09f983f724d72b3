"""The SGLang server as a child process: session, log file and exit."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollmesh.errors import EngineError

_ORPHAN_GUARD = Path(__file__).with_name("orphan_guard.py")
_TAIL_BYTES = 65_536
_TAIL_LINES = 12
_EXCEPTION_LINES = 40
_EXCEPTION_MARKS = ("hit an exception", "Traceback (most recent call last)")
_NOISE = ("nanobind", " - leaked")


def relevant_lines(log: str) -> str:
    """Extract the reason of an exit from a log: its last exception, else its last lines."""
    lines = [line for line in log.splitlines() if line.strip() and not any(noise in line for noise in _NOISE)]
    starts = [number for number, line in enumerate(lines) if any(mark in line for mark in _EXCEPTION_MARKS)]
    if not starts:
        return "\n".join(lines[-_TAIL_LINES:])
    # The trace of an exception starts within 2 lines of its announcement.
    first = next((b for b in starts if starts[-1] - b <= 2), starts[-1])
    return "\n".join(lines[first : first + _EXCEPTION_LINES])


def write_private(file: Path, text: str) -> None:
    """Write a file that only this user can read."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "w", encoding="utf-8", opener=_private) as stream:
        stream.write(text)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class ServerProcess:
    """One started program; ``orphan_guard`` kills it if this process dies."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log_file: Path) -> None:
        self._log_file = log_file
        self._process = self._start(command, environment)
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        threading.Thread(target=self._wait, name="sglang-server", daemon=True).start()

    def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        try:
            self._log_file.parent.mkdir(parents=True, exist_ok=True)
            # Readable by this user only: the server writes its arguments there, including the key.
            with open(self._log_file, "ab", opener=_private) as log:
                self._log_start = log.tell()
                return subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_ORPHAN_GUARD), *command],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=dict(environment),
                    start_new_session=True,
                )
        except OSError as error:
            raise EngineError(f"the SGLang server cannot be started: {error}") from error

    @property
    def pid(self) -> int:
        """Process id of the orphan guard, which leads the session."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self._ended.done()

    async def ended(self) -> int:
        """Wait until the program exits; returns its exit status, or 128 plus the signal that ended it."""
        return await asyncio.shield(self._ended)

    async def stop(self, grace_seconds: float) -> None:
        """Send SIGTERM to the program, and SIGKILL to the whole session after the grace period."""
        if self.alive:
            self._process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_seconds):
                    await self.ended()
        self._kill_session()
        await self.ended()

    def log_tail(self) -> str:
        try:
            with self._log_file.open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, end - _TAIL_BYTES))
                tail = relevant_lines(log.read().decode(errors="replace"))
        except OSError as error:
            return f"its log {self._log_file} cannot be read: {error}"
        return f"see {self._log_file}; its last lines:\n{tail}" if tail else f"it wrote nothing to {self._log_file}"

    def _wait(self) -> None:
        status = self._process.wait()
        self._kill_session()  # processes that the program may have left behind
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(RuntimeError):  # the loop has ended before the server
            self._loop.call_soon_threadsafe(self._ended.set_result, 128 - status if status < 0 else status)

    def _kill_session(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
