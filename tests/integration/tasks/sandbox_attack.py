"""Run one script in the sandbox as the service of an ordinary user would; started by the tests as a process.

``python sandbox_attack.py UID JOB``: as root, take that uid first, as if it had started the run. JOB is JSON with the
script, its input and the limits. Prints JSON: the walls around the script and its standard output.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from rollmesh.tasks.sandbox import host_folders, identity
from rollmesh.tasks.sandbox.command import Sandbox, strongest_isolation
from rollmesh.tasks.sandbox.identity import ResourceLimits


def may_mount() -> bool:
    """Tell whether a separate user namespace lets this uid mount, without the code under test."""
    script = "mount -t tmpfs none /tmp"
    return subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script]).returncode == 0


def main(uid: int, job: dict[str, object]) -> None:
    """Drop to ``uid`` and run the job."""
    if os.geteuid() == 0 and uid != 0:
        host_folders.expose([Path(sys.base_prefix).resolve()])
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    limits = ResourceLimits(
        address_space_bytes=128 << 20, cpu_seconds=60, process_count=16, file_bytes=16 << 20, open_file_count=64
    )
    walls = strongest_isolation(identity.own_uid(0) if os.geteuid() == 0 else None)
    result = Sandbox(limits=limits).run(str(job["script"]).encode(), json.dumps(job["input"]).encode(), 60.0)
    print(json.dumps({"walls": walls.name, "may_mount": may_mount(), "output": result.stdout.decode()}))
    print(result.stderr.decode("utf-8", "replace"), file=sys.stderr)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
