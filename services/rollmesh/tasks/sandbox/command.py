"""Confined execution of one Python script, limited in time, memory, processes and output."""

import os
import resource
import select
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

from rollmesh.errors import VerifierError
from rollmesh.tasks.sandbox import host_folders, identity, kernel
from rollmesh.tasks.sandbox.identity import ResourceLimits, apply_limits

_SCRIPT_NAME = "answer.py"
_ROUNDS = 1000
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
_SCRATCH_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
_TRIAL_SCRATCH_BYTES = 1 << 20
_ERROR_BYTES = 4096


class Isolation(Enum):
    """Isolation of code that the kernel of this machine allows, strongest first."""

    SEALED = "namespaces and a separate root folder"
    NAMESPACES = "namespaces; the files of the host stay"
    NONE = "a uid and resource limits only"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """Result of a script."""

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
        isolation = strongest_isolation(uid)
        with (
            tempfile.TemporaryDirectory(prefix=_folder_prefix(os.getpid()), ignore_cleanup_errors=True) as folder,
            cleared_leftovers() if isolation is Isolation.NONE else nullcontext(),
        ):
            if uid is not None:
                os.chown(folder, uid, uid)
            with self._start(isolation, uid, folder, script) as process:
                try:
                    return _exchange(process, stdin, self.output_bytes, time.monotonic() + timeout_seconds)
                finally:
                    _kill(process)

    def _start(self, isolation: Isolation, uid: int | None, folder: str, script: bytes) -> subprocess.Popen[bytes]:
        def enter() -> None:
            try:
                self._enter(isolation, uid, folder, script)
            except BaseException as error:  # subprocess would drop its text
                os.write(reason_writer, f"{type(error).__name__}: {error}".encode())
                raise

        # The base interpreter of a virtual environment: the environment is not needed and may be private.
        interpreter = os.path.realpath(sys.executable)
        home = host_folders.WORKING_FOLDER if isolation is Isolation.SEALED else folder
        reason_reader, reason_writer = os.pipe()
        with open(reason_reader, encoding="utf-8") as reason:
            try:
                try:
                    return subprocess.Popen(
                        [interpreter, "-I", "-S", "-B", _SCRIPT_NAME],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        env={**_ENVIRONMENT, "HOME": home},
                        start_new_session=True,
                        preexec_fn=enter,
                    )
                finally:
                    os.close(reason_writer)
            except (subprocess.SubprocessError, OSError) as error:
                problem = reason.read() or error
                raise VerifierError(f"python_code: this machine cannot confine code: {problem}") from error

    def _enter(self, isolation: Isolation, uid: int | None, folder: str, script: bytes) -> None:
        """Confine this process, a forked child, and leave ``script`` in its working folder."""
        os.umask(0o077)
        if uid is not None:
            for descriptor in range(3):  # pipes: only their owner may open /dev/stdout
                os.fchown(descriptor, uid, -1)
        working_folder = _isolate(isolation, uid, folder, self.scratch_bytes)
        with suppress(OSError):
            kernel.die_with_parent()
        os.chdir(working_folder)
        Path(_SCRIPT_NAME).write_bytes(script)
        with suppress(OSError):  # not on every kernel and architecture; the measured level reports it
            kernel.filter_system_calls(kernel.call_filter(may_fork=self.may_fork))
        # Last: if the process that forked this one is larger than the limit, no further memory can be allocated.
        apply_limits(self.limits, own_uid=uid is not None or isolation is not Isolation.NONE)


def _uid() -> int | None:
    return identity.own_uid(0) if identity.is_root() else None


@lru_cache(maxsize=8)
def strongest_isolation(uid: int | None) -> Isolation:
    """Return the strongest isolation that this process can have as ``uid`` (None: unchanged), tested in children."""
    interpreter = os.path.realpath(sys.executable)
    for isolation in (Isolation.SEALED, Isolation.NAMESPACES):
        with tempfile.TemporaryDirectory(prefix="rollmesh-isolation-", ignore_cleanup_errors=True) as folder:
            if uid is not None:
                os.chown(folder, uid, uid)

            def attempt(isolation: Isolation = isolation, folder: str = folder) -> None:
                _isolate(isolation, uid, folder, _TRIAL_SCRATCH_BYTES)
                if not os.access(interpreter, os.X_OK):
                    raise PermissionError(f"{interpreter}: not executable in this isolation")

            if identity.succeeds_in_child(attempt):
                return isolation
    return Isolation.NONE


def _isolate(isolation: Isolation, uid: int | None, folder: str, scratch_bytes: int) -> str:
    """Isolate this process, a forked child, as ``uid`` (None: unchanged); return its working folder.

    ``folder`` is on disk: the mount point of a separate root, or the working folder without private scratch space.
    """
    if uid is not None:
        host_folders.expose([Path(sys.base_prefix).resolve()])
        identity.become(uid)
    with suppress(OSError):
        kernel.refuse_new_privileges()
    if isolation is Isolation.NONE:
        return folder
    # New namespaces require a process without other threads. Libraries start some in every fork of a process that uses
    # them, for example OpenTelemetry's export of spans.
    if len(os.listdir("/proc/self/task")) > 1 and (child := kernel.fork_without_hooks()):
        _wait_for(child)
    kept_uid, kept_gid = os.getuid(), os.getgid()
    kernel.unshare(kernel.OWN_NAMESPACES)
    # A change of uid makes root the owner of the files below /proc/self; this undoes it.
    kernel.set_dumpable(True)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{kept_uid} {kept_uid} 1")
    Path("/proc/self/gid_map").write_text(f"{kept_gid} {kept_gid} 1")
    # Process 1 of the new namespace: when it ends, the kernel kills all processes of the namespace.
    if child := os.fork():
        _wait_for(child)
    if isolation is Isolation.SEALED:
        host_folders.seal(folder, scratch_bytes)
        return host_folders.WORKING_FOLDER
    return _private_scratch(scratch_bytes) or folder


def _wait_for(child: int) -> NoReturn:
    """End as ``child`` does; without descriptors, this process keeps no pipe open."""
    os.closerange(0, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    with suppress(OSError):
        kernel.die_with_parent()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(code if code >= 0 else 128 - code)


def _private_scratch(size_bytes: int) -> str | None:
    """Cover the shared scratch folders with a private one in memory; return the first, as the working folder."""
    interpreter = os.path.realpath(sys.base_prefix)
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    covered: list[str] = []
    for folder in _SCRATCH_FOLDERS:
        if interpreter.startswith(f"{folder}/") or not os.path.isdir(folder):
            continue
        with suppress(OSError):
            if covered:
                kernel.mount(covered[0], folder, flags=kernel.MS_BIND)
            else:
                kernel.mount("tmpfs", folder, "tmpfs", flags, f"size={size_bytes},mode=700")
            covered.append(folder)
    return covered[0] if covered else None


def remove_folders_of(pid: int) -> None:
    """Remove the folders of a process that was killed during ``Sandbox.run``."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_folder_prefix(pid)}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _folder_prefix(pid: int) -> str:
    return f"rollmesh-code-{pid}-"


def _exchange(process: subprocess.Popen[bytes], stdin: bytes, output_bytes: int, deadline: float) -> CommandResult:
    """Write the input and read limited output until the script ends, or until ``deadline`` (monotonic seconds)."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    pending, output, errors = memoryview(stdin), bytearray(), bytearray()
    with selectors.DefaultSelector() as selector:
        for stream in (process.stdin, process.stdout, process.stderr):
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_WRITE if stream is process.stdin else selectors.EVENT_READ)
        open_outputs = 2
        while open_outputs and len(output) <= output_bytes and (remaining := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(remaining):
                with suppress(BlockingIOError):  # a script can use the other ends of its pipes
                    if key.fileobj is process.stdin:
                        try:
                            pending = pending[os.write(key.fd, pending[:65536]) :]
                        except BrokenPipeError:
                            pending = pending[:0]
                        if not pending:
                            selector.unregister(process.stdin)
                            process.stdin.close()
                        continue
                    data = os.read(key.fd, 65536)
                    if key.fileobj is process.stdout:
                        output += data
                    else:
                        errors += data[: _ERROR_BYTES - len(errors)]
                    if not data:
                        selector.unregister(key.fileobj)
                        open_outputs -= 1
    if len(output) > output_bytes:
        process.kill()
        open_outputs = 0
    timed_out = open_outputs > 0
    if not timed_out:
        # Wait for the end without reaping the child: the id of its process group is not reused until then.
        descriptor = os.pidfd_open(process.pid)
        try:
            timed_out = not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]
        finally:
            os.close(descriptor)
    _kill(process)
    return CommandResult(stdout=bytes(output), stderr=bytes(errors), timed_out=timed_out)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the remaining processes of a script (its namespace ends with its first process) and wait for their end."""
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    process.wait()


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
