"""Run one Python script, confined and bounded in time, memory, processes and output."""

from __future__ import annotations

import os
import select
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from rollmesh.errors import VerifierError
from rollmesh.tasks.sandbox import identity, leftovers, seal
from rollmesh.tasks.sandbox.enter import Confinement, Walls, enter, strongest_walls
from rollmesh.tasks.sandbox.resource_limits import ResourceLimits

_SCRIPT_NAME = "answer.py"
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """How a script ended."""

    exit_status: int
    """0 is success; 128 + n (or -n) means killed by signal n."""
    stdout: bytes
    """Cut at the limit; a script that writes more is killed."""
    stderr: bytes
    """Cut at the limit."""
    timed_out: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """Where scripts run; every script gets a process, a folder and namespaces of its own."""

    limits: ResourceLimits
    output_bytes: int = 1 << 20
    """Most standard output that is read."""
    scratch_bytes: int = 64 << 20
    """Private space for files, in memory where the machine allows it."""
    may_fork: bool = False
    """Whether scripts may start processes; ``limits`` then hold for each of them."""

    @staticmethod
    def danger() -> str:
        """Why code should not run here: it could reach what is not its own. Empty where it cannot."""
        if identity.is_root():
            return "" if identity.can_become(identity.own_uid(0)) else "root here cannot take another uid"
        if identity.has_own_uid():
            return ""
        match strongest_walls(None):
            case Walls.NONE:
                return (
                    "code would share its uid with other processes and could change this user's files, checkpoints "
                    "and Redis included, and this machine allows no user namespaces"
                )
            case Walls.NAMESPACES:
                return (
                    "code could change this user's files, checkpoints and Redis included: this machine allows user "
                    "namespaces, but no root folder of its own in them (mount, pivot_root, mount_setattr of Linux 5.12)"
                )
        return ""

    def run(self, script: bytes, stdin: bytes, timeout_seconds: float) -> CommandResult:
        """Run ``script`` with the interpreter of this process, without site-packages.

        Raises VerifierError when it cannot be confined at all: code never runs as root.
        """
        uid = identity.own_uid(0) if identity.is_root() else None
        with tempfile.TemporaryDirectory(prefix=_folder_prefix(os.getpid()), ignore_cleanup_errors=True) as folder:
            if uid is not None:
                os.chown(folder, uid, uid)
            confinement = Confinement(
                limits=self.limits,
                uid=uid,
                walls=strongest_walls(uid),
                may_fork=self.may_fork,
                folder=folder,
                scratch_bytes=self.scratch_bytes,
            )
            if confinement.walls is not Walls.NONE:
                return self._run_in(confinement, script, stdin, timeout_seconds)
            with leftovers.cleared():
                return self._run_in(confinement, script, stdin, timeout_seconds)

    def _run_in(self, confinement: Confinement, script: bytes, stdin: bytes, timeout_seconds: float) -> CommandResult:
        # The interpreter below a virtual environment: the environment itself is not needed and may be private.
        interpreter = os.path.realpath(sys.executable)
        home = seal.WORKING_FOLDER if confinement.walls is Walls.SEALED else confinement.folder
        try:
            process = subprocess.Popen(
                [interpreter, "-I", "-S", "-B", _SCRIPT_NAME],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**_ENVIRONMENT, "HOME": home},
                start_new_session=True,
                preexec_fn=partial(enter, confinement, _SCRIPT_NAME, script),
            )
        except (subprocess.SubprocessError, OSError) as error:
            raise VerifierError(f"python_code: this machine does not let code be confined: {error}") from error
        with process:
            try:
                return _Conversation(process, stdin, self.output_bytes).run(time.monotonic() + timeout_seconds)
            finally:
                _end(process)


def remove_folders_of(pid: int) -> None:
    """Remove what a process that was killed in the middle of ``Sandbox.run`` could not."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_folder_prefix(pid)}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _folder_prefix(pid: int) -> str:
    return f"rollmesh-code-{pid}-"


class _Conversation:
    """Feeds standard input and reads bounded output until the script ends or its time is up."""

    def __init__(self, process: subprocess.Popen[bytes], stdin: bytes, output_bytes: int) -> None:
        self._process = process
        self._pending = memoryview(stdin)
        self._output_bytes = output_bytes
        self._output: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self._selector = selectors.DefaultSelector()

    def run(self, deadline: float) -> CommandResult:
        """Talk until ``deadline`` (monotonic seconds)."""
        with self._selector:
            self._register(self._process.stdin, selectors.EVENT_WRITE, "stdin")
            self._register(self._process.stdout, selectors.EVENT_READ, "stdout")
            self._register(self._process.stderr, selectors.EVENT_READ, "stderr")
            timed_out = not self._talk(deadline)
        timed_out = timed_out or not _ended(self._process.pid, deadline)
        return CommandResult(
            exit_status=_end(self._process),
            stdout=bytes(self._output["stdout"]),
            stderr=bytes(self._output["stderr"]),
            timed_out=timed_out,
        )

    def _register(self, stream: IO[bytes] | None, events: int, name: str) -> None:
        assert stream is not None  # all three are pipes
        os.set_blocking(stream.fileno(), False)
        self._selector.register(stream, events, name)

    def _talk(self, deadline: float) -> bool:
        """True when both outputs have ended (or said too much), False when the time is up."""
        open_outputs = 2
        while open_outputs:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            for key, _ in self._selector.select(remaining):
                if key.data == "stdin":
                    self._feed(key)
                elif not self._read(key):
                    open_outputs -= 1
                    if len(self._output["stdout"]) > self._output_bytes:
                        self._process.kill()
                        return True
        return True

    def _feed(self, key: selectors.SelectorKey) -> None:
        stream = self._process.stdin
        assert stream is not None
        try:
            written = os.write(key.fd, self._pending[:65536])
            self._pending = self._pending[written:]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._pending = memoryview(b"")
        if not self._pending:
            self._selector.unregister(stream)
            with suppress(BrokenPipeError):
                stream.close()

    def _read(self, key: selectors.SelectorKey) -> bool:
        """Take what there is; False once this output is over, or over its limit."""
        try:
            data = os.read(key.fd, 65536)
        except BlockingIOError:
            return True
        output = self._output[key.data]
        if key.data == "stdout":
            output += data
        else:
            output += data[: 4096 - len(output)]
        if not data or (key.data == "stdout" and len(output) > self._output_bytes):
            self._selector.unregister(key.fileobj)
            return False
        return True


def _ended(pid: int, deadline: float) -> bool:
    """Wait until a child has ended, without reaping it: until then its process group's number is its own."""
    descriptor = os.pidfd_open(pid)
    try:
        readable, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
    finally:
        os.close(descriptor)
    return bool(readable)


def _end(process: subprocess.Popen[bytes]) -> int:
    """Kill what is left of a script (its first process takes its namespace along) and give its exit status."""
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    return process.wait()
