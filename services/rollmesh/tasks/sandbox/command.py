"""Confined execution of one Python script, limited in time, memory, processes and output."""

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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from rollmesh.errors import VerifierError
from rollmesh.tasks.sandbox import identity, kernel
from rollmesh.tasks.sandbox.enter import Confinement, Isolation, enter, strongest_isolation
from rollmesh.tasks.sandbox.host_folders import WORKING_FOLDER
from rollmesh.tasks.sandbox.identity import ResourceLimits

_SCRIPT_NAME = "answer.py"
_ROUNDS = 1000
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """Result of a script."""

    exit_status: int
    """Exit status: 0 for success; 128 + n (or -n) if signal n killed the script."""
    stdout: bytes
    """Standard output, cut at the limit; a script that writes more is killed."""
    stderr: bytes
    """Standard error, cut at the limit."""
    timed_out: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """Sandbox for scripts; every script gets its own process, folder and namespaces."""

    limits: ResourceLimits
    output_bytes: int = 1 << 20
    """Limit of standard output."""
    scratch_bytes: int = 64 << 20
    """Size of the private space for files, in memory where the machine allows it."""
    may_fork: bool = False
    """True if scripts may start processes; ``limits`` then apply to each of them."""

    @staticmethod
    def unsafe_reason() -> str:
        """Return the reason why code must not run here (it could reach other files or processes); empty if safe."""
        if identity.is_root():
            return "" if identity.can_become(identity.own_uid(0)) else "root here cannot take another uid"
        if identity.has_own_uid():
            return ""
        match strongest_isolation(None):
            case Isolation.NONE:
                return (
                    "code would share its uid with other processes and could change this user's files, checkpoints "
                    "and Redis included, and this machine allows no user namespaces"
                )
            case Isolation.NAMESPACES:
                return (
                    "code could change this user's files, checkpoints and Redis included: this machine allows user "
                    "namespaces, but no separate root folder in them (mount, pivot_root, mount_setattr of Linux 5.12)"
                )
        return ""

    @staticmethod
    def ends_all_processes() -> bool:
        """Tell whether the first process of a script can end all others: it is the first one of a namespace."""
        return strongest_isolation(_uid()) is not Isolation.NONE

    def run(self, script: bytes, stdin: bytes, timeout_seconds: float) -> CommandResult:
        """Run ``script`` with the interpreter of this process, without site-packages.

        Raises VerifierError if the script cannot be confined: code never runs as root.
        """
        uid = _uid()
        with tempfile.TemporaryDirectory(prefix=_folder_prefix(os.getpid()), ignore_cleanup_errors=True) as folder:
            if uid is not None:
                os.chown(folder, uid, uid)
            confinement = Confinement(
                limits=self.limits,
                uid=uid,
                isolation=strongest_isolation(uid),
                may_fork=self.may_fork,
                folder=folder,
                scratch_bytes=self.scratch_bytes,
            )
            if confinement.isolation is not Isolation.NONE:
                return self._run_in(confinement, script, stdin, timeout_seconds)
            with cleared_leftovers():
                return self._run_in(confinement, script, stdin, timeout_seconds)

    def _run_in(self, confinement: Confinement, script: bytes, stdin: bytes, timeout_seconds: float) -> CommandResult:
        # The base interpreter of a virtual environment: the environment is not needed and may be private.
        interpreter = os.path.realpath(sys.executable)
        home = WORKING_FOLDER if confinement.isolation is Isolation.SEALED else confinement.folder
        process = _start([interpreter, "-I", "-S", "-B", _SCRIPT_NAME], home, confinement, script)
        with process:
            try:
                return _ScriptIO(process, stdin, self.output_bytes).run(time.monotonic() + timeout_seconds)
            finally:
                _kill(process)


def _uid() -> int | None:
    return identity.own_uid(0) if identity.is_root() else None


def _start(command: list[str], home: str, confinement: Confinement, script: bytes) -> subprocess.Popen[bytes]:
    reason_reader, reason_writer = os.pipe()
    with open(reason_reader, encoding="utf-8") as reason:
        try:
            try:
                return subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={**_ENVIRONMENT, "HOME": home},
                    start_new_session=True,
                    preexec_fn=partial(_enter, reason_writer, confinement, script),
                )
            finally:
                os.close(reason_writer)
        except (subprocess.SubprocessError, OSError) as error:
            raise VerifierError(f"python_code: this machine cannot confine code: {reason.read() or error}") from error


def _enter(reason_writer: int, confinement: Confinement, script: bytes) -> None:
    """Enter the confinement; on an error, write its text, which subprocess would drop."""
    try:
        enter(confinement, _SCRIPT_NAME, script)
    except BaseException as error:
        os.write(reason_writer, f"{type(error).__name__}: {error}".encode())
        raise


def remove_folders_of(pid: int) -> None:
    """Remove the folders of a process that was killed during ``Sandbox.run``."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_folder_prefix(pid)}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _folder_prefix(pid: int) -> str:
    return f"rollmesh-code-{pid}-"


class _ScriptIO:
    """Writer of standard input and reader of limited output, until the script ends or its time is up."""

    def __init__(self, process: subprocess.Popen[bytes], stdin: bytes, output_bytes: int) -> None:
        self._process = process
        self._pending = memoryview(stdin)
        self._output_bytes = output_bytes
        self._output: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self._selector = selectors.DefaultSelector()

    def run(self, deadline: float) -> CommandResult:
        """Exchange input and output until ``deadline`` (monotonic seconds)."""
        with self._selector:
            self._register(self._process.stdin, selectors.EVENT_WRITE, "stdin")
            self._register(self._process.stdout, selectors.EVENT_READ, "stdout")
            self._register(self._process.stderr, selectors.EVENT_READ, "stderr")
            timed_out = not self._exchange(deadline)
        if not timed_out:
            # Wait for the end without reaping the child: the id of its process group is not reused until then.
            descriptor = os.pidfd_open(self._process.pid)
            try:
                timed_out = not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]
            finally:
                os.close(descriptor)
        return CommandResult(
            exit_status=_kill(self._process),
            stdout=bytes(self._output["stdout"]),
            stderr=bytes(self._output["stderr"]),
            timed_out=timed_out,
        )

    def _register(self, stream: IO[bytes] | None, events: int, name: str) -> None:
        assert stream is not None  # all three are pipes
        os.set_blocking(stream.fileno(), False)
        self._selector.register(stream, events, name)

    def _exchange(self, deadline: float) -> bool:
        """Return True if both outputs ended or exceeded their limit, and False if the time is up."""
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
        """Read available data; return False if the output has ended or exceeded its limit."""
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


def _kill(process: subprocess.Popen[bytes]) -> int:
    """Kill the remaining processes of a script (its namespace ends with its first process); return the exit status."""
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    return process.wait()


@contextmanager
def cleared_leftovers() -> Iterator[None]:
    """Kill and reap the processes that the code in the block leaves behind.

    This process adopts orphans only inside the block, because it would not reap later ones.
    """
    adopted_before = kernel.adopts_orphans()
    kernel.adopt_orphans()
    before = _children()
    try:
        yield
    finally:
        clear_leftovers(before)
        kernel.adopt_orphans(adopted_before)


def clear_leftovers(before: frozenset[int]) -> None:
    """Kill and reap every child that is not in ``before``, and then the children that these leave behind."""
    for _ in range(_ROUNDS):
        left = _children() - before
        if not left:
            return
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> frozenset[int]:
    pid = os.getpid()
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    except OSError:  # not Linux, or a kernel built without this list
        return frozenset()
    return frozenset(map(int, text.split()))
