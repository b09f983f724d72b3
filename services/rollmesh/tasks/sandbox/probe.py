"""Measurement of the sandbox on this machine, by code that runs in it."""

import json
import os
import socket
import sys
import tempfile
from dataclasses import dataclass

from rollmesh.errors import VerifierError
from rollmesh.tasks.sandbox.command import Sandbox
from rollmesh.tasks.sandbox.identity import ResourceLimits

_PROBE_TIMEOUT_SECONDS = 10.0
_MEMORY_BYTES = 256 << 20
_PROCESS_COUNT = 4
_SCRATCH_BYTES = 1 << 20
_SCRIPT = """
import json, os, socket, sys
job = json.load(sys.stdin)

def works(action, *arguments):
    try:
        return action(*arguments) or True
    except (OSError, MemoryError):
        return False

def write(path, size):
    with open(path, "wb") as file:
        file.write(bytes(size))

def leaves(path):
    write(path, 1)
    os.unlink(path)

folders = ("/", "/usr/lib", os.path.dirname(sys.executable))
outside = [f"{folder}/rollmesh-probe" for folder in folders]
seen = {
    "uid": os.getuid(),
    "first_process": os.getpid() == 1,
    "connects": works(lambda: socket.create_connection(("127.0.0.1", job["port"]), 5).close()),
    "sees_files": os.path.exists(job["marker"]) or any([works(leaves, path) for path in outside]),
    "fills_disk": all([works(write, f"filler{n}", job["scratch_bytes"] // 2) for n in range(4)]),
    "memory": works(lambda: len(bytearray(job["memory_bytes"]))),
}
children = 0
try:
    while children < job["tried"]:
        if os.fork() == 0:
            os.read(0, 1)
            os._exit(0)
        children += 1
except OSError:
    pass
seen["children"] = children
print(json.dumps(seen), flush=True)
os._exit(0)
"""
_UNRESTRICTED = {
    "own_network": "connect to the network, to the ports of this run on loopback too",
    "own_processes": "see the processes of this machine and signal those of its uid",
    "own_files": "read every file and use every folder and socket that its uid or all users may",
    "own_scratch": "fill the disk of its working folder",
    "memory_limited": "use all memory",
    "memory_limited_together": "start processes, each with its own memory limit",
    "processes_limited": "start any number of processes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLevel:
    """Confinement of the code of an answer; False for parts that this machine does not provide."""

    available: bool = False
    """True if code can run; it never runs as root."""
    own_network: bool = False
    """True if code has an empty network only."""
    own_processes: bool = False
    """True if code sees and signals its own processes only, and they all end with it."""
    own_files: bool = False
    """True if code sees only the interpreter and libraries of the host, and can write to its own folder only."""
    own_scratch: bool = False
    """True if files are stored in limited private memory."""
    memory_limited: bool = False
    memory_limited_together: bool = False
    """True if the memory limit applies to all that an answer runs: a single process, with its threads."""
    processes_limited: bool = False

    def remaining(self) -> list[str]:
        if not self.available:
            return []
        return [words for name, words in _UNRESTRICTED.items() if not getattr(self, name)]


def probe_sandbox() -> SandboxLevel:
    """Run a probe in a sandbox and report the confinement."""
    if sys.platform != "linux":
        return SandboxLevel()
    limits = ResourceLimits(
        address_space_bytes=_MEMORY_BYTES,
        cpu_seconds=5,
        process_count=_PROCESS_COUNT,
        file_bytes=1 << 20,
        open_file_count=64,
    )
    # This number of children is harmless even without a limit.
    tried = 4 * _PROCESS_COUNT
    sandbox = Sandbox(limits=limits, scratch_bytes=_SCRATCH_BYTES)
    try:
        with (
            tempfile.NamedTemporaryFile(prefix="rollmesh-probe-") as marker,
            socket.create_server(("127.0.0.1", 0)) as port,
        ):
            os.chmod(marker.name, 0o666)
            job = {
                "marker": marker.name,
                "port": port.getsockname()[1],
                "scratch_bytes": _SCRATCH_BYTES,
                "memory_bytes": 2 * _MEMORY_BYTES,
                "tried": tried,
            }
            result = sandbox.run(_SCRIPT.encode(), json.dumps(job).encode(), _PROBE_TIMEOUT_SECONDS)
        seen = json.loads(result.stdout)
    except (VerifierError, OSError, ValueError):
        return SandboxLevel()
    return SandboxLevel(
        available=seen["uid"] != 0,
        own_network=not seen["connects"],
        own_processes=seen["first_process"],
        own_files=not seen["sees_files"],
        own_scratch=not seen["fills_disk"],
        memory_limited=not seen["memory"],
        memory_limited_together=not seen["memory"] and seen["children"] == 0,
        processes_limited=seen["children"] < tried,
    )
