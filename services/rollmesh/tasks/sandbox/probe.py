"""What the sandbox for code really does on this machine, found out by running code in it."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass

from rollmesh.errors import VerifierError
from rollmesh.tasks.sandbox.command import Sandbox
from rollmesh.tasks.sandbox.limits import ResourceLimits

_PROBE_TIMEOUT_SECONDS = 10.0
_MEMORY_BYTES = 256 << 20
_PROCESS_COUNT = 4
_SCRIPT = """
import json, os
seen = {"uid": os.getuid(), "descriptors": len(os.listdir("/proc/self/fd"))}
for name in ("net", "pid", "ipc", "mnt"):
    seen[name] = os.readlink(f"/proc/self/ns/{name}")
try:
    bytearray(%d)
    seen["memory"] = False
except MemoryError:
    seen["memory"] = True
children = 0
try:
    while children < %d:
        if os.fork() == 0:
            os.read(0, 1)
            os._exit(0)
        children += 1
except OSError:
    pass
seen["processes"] = children < %d
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
    own_scratch: bool = False
    """Files go to bounded private memory."""
    memory_limited: bool = False
    processes_limited: bool = False


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
    script = _SCRIPT % (2 * _MEMORY_BYTES, tried, tried)
    try:
        result = Sandbox(limits=limits, scratch_bytes=1 << 20).run(script.encode(), b"", _PROBE_TIMEOUT_SECONDS)
        seen = json.loads(result.stdout)
    except (VerifierError, OSError, ValueError):
        return SandboxLevel()
    return SandboxLevel(
        available=seen["uid"] != 0,
        own_network=seen["net"] != os.readlink("/proc/self/ns/net"),
        own_processes=seen["pid"] != os.readlink("/proc/self/ns/pid"),
        own_scratch=seen["mnt"] != os.readlink("/proc/self/ns/mnt"),
        memory_limited=seen["memory"],
        processes_limited=seen["processes"],
    )
