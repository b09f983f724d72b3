"""What the sandbox for code really does on this machine, found out by running code in it."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from dataclasses import dataclass

from rollmesh.errors import VerifierError
from rollmesh.tasks.sandbox.command import Sandbox
from rollmesh.tasks.sandbox.resource_limits import ResourceLimits

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLevel:
    """What confines the code of an answer; False is: not on this machine."""

    available: bool = False
    """Code can be run at all; it never runs as root."""
    own_network: bool = False
    """No network but an empty one."""
    own_processes: bool = False
    """It sees and signals no process of others, and all of its own end with it."""
    own_files: bool = False
    """Of the host it sees the interpreter and libraries only, and can change nothing but its own folder."""
    own_scratch: bool = False
    """Files go to bounded private memory."""
    memory_limited: bool = False
    memory_limited_together: bool = False
    """The limit holds for all that an answer runs: it is one process, with as many threads as it may have."""
    processes_limited: bool = False

    def remaining(self) -> list[str]:
        """What code can do here, in words, because this machine does not stop it."""
        if not self.available:
            return []
        return [words for name, words in _OPEN.items() if not getattr(self, name)]


_OPEN = {
    "own_network": "connect to the network, to the ports of this run on loopback too",
    "own_processes": "see the processes of this machine and signal those of its uid",
    "own_files": "read every file and use every folder and socket that its uid or all users may",
    "own_scratch": "fill the disk of its working folder",
    "memory_limited": "use all memory",
    "memory_limited_together": "start processes, each with the memory limit for itself",
    "processes_limited": "start any number of processes",
}


def probe_sandbox() -> SandboxLevel:
    """Run a probe in a sandbox and compare what it sees with what this process sees."""
    if sys.platform != "linux":
        return SandboxLevel()
    limits = ResourceLimits(
        address_space_bytes=_MEMORY_BYTES,
        cpu_seconds=5,
        process_count=_PROCESS_COUNT,
        file_bytes=1 << 20,
        open_file_count=64,
    )
    # Without a limit in force this many children are still harmless.
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
