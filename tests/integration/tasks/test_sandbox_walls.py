"""Scored code attacks the run that it belongs to: files, secret, sockets, processes, memory.

As root the attacks run twice: under the uid of its own that root gives to code, and as the code of an ordinary user,
whose uid owns the run. Where the kernel does not let us seal code off, the test says so and is skipped.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollmesh.errors import ConfigError, VerifierError
from rollmesh.tasks.sandbox import command, identity
from rollmesh.tasks.sandbox.command import Isolation, Sandbox, strongest_isolation
from rollmesh.tasks.sandbox.probe import SandboxLevel, probe_sandbox
from rollmesh.tasks.verifiers.python_code import PythonCodeVerifier

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces and seccomp are Linux's")

ORDINARY_UID = 23_456
USERS = [ORDINARY_UID, 0] if os.geteuid() == 0 else [os.geteuid()]
ATTACK_SECONDS = 120.0


def attack(uid: int, script: str, **values: Any) -> dict[str, Any]:
    """Return the script's JSON output; skip the test where code is not sealed off."""
    job = json.dumps({"script": script, "input": values})
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("sandbox_attack.py")), str(uid), job],
        capture_output=True,
        timeout=ATTACK_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    report = json.loads(done.stdout)
    if report["walls"] != Isolation.SEALED.name:
        assert not report["may_mount"], "this machine allows the walls, and they were not built"
        pytest.skip(f"uid {uid} gets no root folder of its own on this machine: {Isolation[report['walls']].value}")
    found: dict[str, Any] = json.loads(report["output"] or "null")
    assert found is not None, done.stderr
    return found


@pytest.fixture(params=USERS, ids=[f"uid {uid}" for uid in USERS])
def uid(request: pytest.FixtureRequest) -> int:
    """The user that started the run."""
    chosen: int = request.param
    return chosen


@pytest.fixture
def run_folder(uid: int) -> Iterator[Path]:
    """A run of that user: a secret, a checkpoint, Redis' socket, and a folder that is open to all beside it."""
    # Not below /tmp, which code does not see anyway.
    parent = "/var/lib" if os.geteuid() == 0 else os.path.expanduser("~")
    with tempfile.TemporaryDirectory(prefix="rollmesh-walls-", dir=parent) as name:
        top = Path(name)
        (top / "run" / "checkpoints").mkdir(parents=True)
        (top / "run" / "secret").write_text("the-secret")
        (top / "run" / "checkpoints" / "COMMITTED").write_text("state")
        (top / "open").mkdir()
        (top / "home").mkdir()
        (top / "home" / ".netrc").write_text("password")
        (top / "answers.jsonl").write_text("expected")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(top / "run" / "redis.sock"))
        listener.listen()
        for path in (top, *top.rglob("*")):
            os.chown(path, uid, uid)
            path.chmod(0o755 if path == top else 0o644 if path.suffix == ".jsonl" else 0o700)
        (top / "open").chmod(0o777)
        with listener:
            yield top
        shutil.rmtree(top / "open", ignore_errors=True)


STEAL = """
import json, os, socket, sys
job = json.load(sys.stdin)
top = job["top"]

def works(action, *arguments):
    try:
        action(*arguments)
    except OSError:
        return False
    return True

def write(path):
    with open(path, "w") as file:
        file.write("changed")

found = {
    "reads the secret": works(lambda: open(top + "/run/secret").read()),
    "overwrites a checkpoint": works(lambda: open(top + "/run/checkpoints/COMMITTED", "r+").close()),
    "deletes a checkpoint": works(os.unlink, top + "/run/checkpoints/COMMITTED"),
    "lists the run folder": works(os.listdir, top + "/run"),
    "connects to Redis": works(lambda: socket.socket(socket.AF_UNIX).connect(top + "/run/redis.sock")),
    "writes where all may": works(write, top + "/open/left"),
    "reads the data set": works(lambda: open(top + "/answers.jsonl").read()),
    "reads the home": works(lambda: open(top + "/home/.netrc").read()),
    "writes beside the interpreter": works(write, os.path.dirname(sys.executable) + "/left"),
    "writes to the root folder": works(write, "/left"),
    "sees other processes": len([name for name in os.listdir("/proc") if name.isdigit()]) > 1,
    "reaches the old root": works(os.listdir, "/proc/1/root" + top),
}
write("mine")
found["writes to its own folder"] = open("mine").read() == "changed"
print(json.dumps(found))
"""


def test_code_reaches_nothing_of_the_run_that_it_belongs_to(uid: int, run_folder: Path) -> None:
    found = attack(uid, STEAL, top=str(run_folder))
    assert found.pop("writes to its own folder"), "the only place it has"
    assert not [name for name, done in found.items() if done]
    assert (run_folder / "run" / "checkpoints" / "COMMITTED").read_text() == "state"
    assert not (run_folder / "open" / "left").exists()


HOARD = """
import ctypes, json, os, subprocess, sys, threading
libc = ctypes.CDLL(None, use_errno=True)

def works(action):
    try:
        return action() not in (-1, None)
    except (OSError, MemoryError, ValueError):
        return False

def fork():
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return True

def fill(count, size):
    for n in range(count):
        with open(f"hoard{n}", "wb") as file:
            file.write(bytes(size))
    return True

threads = [threading.Thread(target=lambda: None) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(json.dumps({
    "forks": works(fork),
    "starts a program": works(lambda: subprocess.run(["/bin/true"]).returncode),
    "makes a memory file": works(lambda: libc.memfd_create(b"hoard", 0)),
    "makes a shared segment": works(lambda: libc.shmget(0, 1 << 20, 0o1600)),
    "makes namespaces of its own": works(lambda: libc.unshare(0x10020000)),
    "mounts": works(lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, b"")),
    "takes the scratch space away": works(lambda: libc.umount2(b"/tmp", 2)),
    "takes more than its memory": works(lambda: bytearray(256 << 20)),
    "writes more than its scratch space": works(lambda: fill(9, 8 << 20)),
    "makes files without end": works(lambda: fill(5000, 0)),
}))
"""


def test_memory_is_bounded_for_all_that_code_runs_together(uid: int) -> None:
    found = attack(uid, HOARD)
    assert not [name for name, done in found.items() if done]


def test_code_that_may_fork_shares_its_memory_between_its_processes() -> None:
    with pytest.raises(ConfigError, match=r"may_fork shares memory_bytes=536870912 between process_count=16"):
        PythonCodeVerifier(may_fork=True, allow_shared_uid=True)
    verifier = PythonCodeVerifier(may_fork=True, process_count=4, allow_shared_uid=True)
    assert verifier.sandbox.limits.address_space_bytes == 128 << 20
    code = "import os, sys\npid = os.fork()\nif pid == 0: os._exit(7)\nprint(os.waitpid(pid, 0)[1] >> 8)"
    assert verifier.verify(code, {"tests": [{"input": "", "output": "7"}]}).value == 1.0


def test_code_that_cannot_be_confined_is_refused_with_the_error_of_the_kernel() -> None:
    if strongest_isolation(identity.own_uid(0) if os.geteuid() == 0 else None) is not Isolation.SEALED:
        pytest.skip("nothing is mounted on this machine")
    limits = PythonCodeVerifier(allow_shared_uid=True).sandbox.limits
    with pytest.raises(VerifierError, match=r"cannot confine code: OSError: .*mount .*Invalid argument"):
        Sandbox(limits=limits, scratch_bytes=-1).run(b"", b"", timeout_seconds=60.0)


FORKS_WITH_A_THREAD = """
import os, threading
from rollmesh.tasks.sandbox.probe import probe_sandbox

def start_a_thread():
    threading.Thread(target=threading.Event().wait, daemon=True).start()

before = probe_sandbox()
os.register_at_fork(after_in_child=start_a_thread)
from rollmesh.tasks.sandbox.command import strongest_isolation
strongest_isolation.cache_clear()
after = [probe_sandbox() for _ in range(3)]
assert after == [before] * 3, (before, after)
"""


def test_code_is_confined_as_well_when_a_library_starts_a_thread_in_every_fork() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS_WITH_A_THREAD], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


OWNERS_OF_STREAMS = """
import os
from rollmesh.tasks.sandbox.probe import probe_sandbox

before = [os.fstat(descriptor) for descriptor in range(3)]
assert probe_sandbox().available
after = [os.fstat(descriptor) for descriptor in range(3)]
assert [each.st_uid for each in after] == [each.st_uid for each in before]
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes owners")
def test_the_streams_of_the_service_keep_their_owner(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as stream:
        done = subprocess.run([sys.executable, "-c", OWNERS_OF_STREAMS], stdin=subprocess.DEVNULL, stderr=stream)
    assert done.returncode == 0, log.read_text()
    assert log.stat().st_uid == os.geteuid()


def test_answers_still_use_threads_and_files_and_every_stream() -> None:
    code = (
        "import sys, tempfile, threading, multiprocessing.pool, time, zoneinfo, random, os\n"
        "with multiprocessing.pool.ThreadPool(4) as pool: total = sum(pool.map(int, sys.stdin.read().split()))\n"
        "with tempfile.TemporaryFile() as file: file.write(b'x')\n"
        "open('/dev/null', 'w').write('x'); os.urandom(4); open(os.path.expanduser('~/mine'), 'w').close()\n"
        "print(total)"
    )
    verifier = PythonCodeVerifier(timeout_seconds=60.0, allow_shared_uid=True)
    assert verifier.verify(code, {"tests": [{"input": "1 2 3", "output": "6"}]}).value == 1.0


def test_the_level_says_what_this_machine_leaves_open(monkeypatch: pytest.MonkeyPatch) -> None:
    walls = strongest_isolation(identity.own_uid(0) if os.geteuid() == 0 else None)
    level = probe_sandbox()
    print(walls, level)
    assert level.available
    sealed = walls is Isolation.SEALED
    if sealed:
        assert level.own_files and level.own_network and level.own_processes and level.own_scratch
    assert (level.remaining() == []) == sealed
    monkeypatch.setattr(command, "strongest_isolation", lambda uid: Isolation.NONE)
    bare = probe_sandbox()
    assert not (bare.own_files or bare.own_network or bare.own_processes or bare.own_scratch)
    said = "; ".join(bare.remaining())
    for words in ("ports of this run", "signal those of its uid", "every folder and socket", "fill the disk"):
        assert words in said
    assert SandboxLevel().remaining() == [], "where code never runs, nothing is open"


@pytest.mark.parametrize(
    ("walls", "message"),
    [
        (
            Isolation.NONE,
            "this user's files, checkpoints and Redis included, and this machine allows no user namespaces",
        ),
        (Isolation.NAMESPACES, "no separate root folder"),
    ],
)
def test_an_ordinary_user_without_walls_is_refused_and_told_what_is_open(
    monkeypatch: pytest.MonkeyPatch, walls: Isolation, message: str
) -> None:
    monkeypatch.delenv(identity.OWN_UID_VARIABLE, raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(command, "strongest_isolation", lambda uid: walls)
    with pytest.raises(ConfigError, match=message):
        PythonCodeVerifier()
