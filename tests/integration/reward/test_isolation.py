"""The level of isolation that the service prints is the level that holds."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollmesh.config.load import write_run_config
from rollmesh.errors import ConfigError
from rollmesh.reward.confinement import IsolationLevel
from rollmesh.tasks.sandbox.identity import SLOTS_PER_PROCESS
from rollmesh.types import OutcomeKind

from .reward_bench import WAIT_SECONDS, ScoringBench, gate, make_config, running_service, scoring_bench

AS_ROOT = os.geteuid() == 0

as_root = pytest.mark.skipif(not AS_ROOT, reason="only a service that runs as root gives workers uids of their own")


async def measured(bench: ScoringBench) -> IsolationLevel:
    return IsolationLevel.from_report(json.loads(await bench.pool.probe()))


async def test_a_worker_with_a_uid_of_its_own_reaches_nothing_of_the_service(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("token")
    secret.chmod(0o600)
    async with scoring_bench(make_config(tmp_path, verifier="poisonous:verify")) as bench:
        level = await measured(bench)
        print(level)
        assert level.own_uid == (AS_ROOT and level.uid != os.geteuid())
        assert (await bench.score("uid")).value * 8 == level.uid or level.own_uid
        if not level.own_uid:
            return
        uids = {o.value for o in await bench.score_all(["uid"] * 40)}
        assert os.geteuid() not in uids
        for answer in (f"read {secret}", f"signal {os.getpid()}"):
            outcome = await bench.score(answer)
            assert outcome.kind is OutcomeKind.VERIFIER_ERROR
            assert "PermissionError" in outcome.message or "FileNotFoundError" in outcome.message


@as_root
async def test_a_worker_outlives_more_others_than_there_are_uids(tmp_path: Path) -> None:
    async with scoring_bench(make_config(tmp_path, verifier="poisonous:verify", workers=4)) as bench:
        if not (await measured(bench)).own_uid:
            pytest.skip("root here cannot take another uid")
        with gate() as held:
            waiting = asyncio.create_task(bench.score(held.answer))
            await held.begun()
            # Each of these answers ends two workers.
            await bench.score_all(["hard_exit"] * (SLOTS_PER_PROCESS // 2 + 4))
            held.open()
            assert (await waiting).value == 1.0
            assert not held.has_begun_again, "the end of a worker with the same uid would have killed this one"


@as_root
async def test_more_workers_than_uids_are_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path, verifier="poisonous:verify", workers=SLOTS_PER_PROCESS)
    with pytest.raises(ConfigError, match=r"reward\.workers=256: .* separate uids for at most 255 workers"):
        async with scoring_bench(config):
            pass


async def test_limits_that_are_printed_bind(tmp_path: Path) -> None:
    async with scoring_bench(make_config(tmp_path, verifier="poisonous:verify", timeout_seconds=5.0)) as bench:
        level = await measured(bench)
        if level.memory_limited:
            assert "MemoryError" in (await bench.score("memory")).message
        if level.processes_limited and level.own_uid:
            assert 0 < (await bench.score("children")).value <= 64
        assert level.processes_limited or os.geteuid() == 0, "only root escapes a limit on processes"


REACH_OUT = """
import socket
try:
    socket.create_connection(("127.0.0.1", {port}), 2).close()
    print("connected")
except OSError:
    print("refused")
"""
LOOK_AROUND = """
import os
def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
print("seen" if alive({pid}) else "alone")
"""
WRITE = "open('{path}', 'w').write('x'); print('written')"


async def test_code_is_confined_as_printed(tmp_path: Path) -> None:
    async def hello(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    config = make_config(tmp_path, verifier="python_code", timeout_seconds=10.0)
    async with scoring_bench(config) as bench, await asyncio.start_server(hello, "127.0.0.1", 0) as server:
        level = (await measured(bench)).code
        port = server.sockets[0].getsockname()[1]

        async def prints(code: str, output: str) -> bool:
            tests: dict[str, Any] = {"tests": [{"input": "", "output": output}]}
            outcome = await bench.score(f"```python\n{code}\n```", tests)
            assert outcome.kind is (OutcomeKind.SCORED if level.available else OutcomeKind.VERIFIER_ERROR)
            return outcome.value == 1.0

        if not level.available:
            assert not await prints("print(1)", "1")
            return
        assert await prints("print(1)", "1")
        assert await prints(REACH_OUT.format(port=port), "refused" if level.own_network else "connected")
        assert await prints(LOOK_AROUND.format(pid=os.getpid()), "alone" if level.own_processes else "seen")
        left = Path("/tmp") / f"rollmesh-test-{os.getpid()}"
        assert await prints(WRITE.format(path=left), "written")
        assert left.exists() != level.own_scratch
        left.unlink(missing_ok=True)
        if level.memory_limited:
            assert not await prints("x = bytearray(1 << 30); print(1)", "1")


async def test_the_level_is_logged_and_exported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    httpx = pytest.importorskip("httpx")
    config = make_config(tmp_path, verifier="poisonous:verify")
    async with running_service(config) as endpoint, httpx.AsyncClient(timeout=WAIT_SECONDS) as client:
        text = (await client.get(f"http://{endpoint.admin}/metrics")).text
    logged = "".join(capfd.readouterr())
    assert "isolation_measured" in logged
    for name in ("own_uid", "memory_limited", "processes_limited", "code_own_network", "code_available"):
        value = next(line for line in text.splitlines() if f'isolation_enforced{{property="{name}"}}' in line)[-3:]
        assert (value == "1.0") == (name.replace("_", " ") in logged.partition("lacks:")[0])


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="namespaces and seccomp are Linux's")

ORDINARY_UID = 23_457
START = """
import os, sys
from pathlib import Path
from rollmesh.tasks.sandbox import host_folders, kernel
uid = int(sys.argv[1])
if os.geteuid() == 0:
    host_folders.expose([Path(sys.base_prefix).resolve()])
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
kernel.refuse_new_privileges()
kernel.filter_system_calls(kernel.call_filter(may_fork=True))  # it refuses new namespaces to all that follows
os.execv(sys.executable, [sys.executable, "-m", "rollmesh.cli.main", "reward", sys.argv[2]])
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that the ordinary user may write to."""
    with tempfile.TemporaryDirectory(prefix="partial-walls-") as name:
        yield Path(name)


def start(folder: Path, **options: object) -> subprocess.Popen[str]:
    """The service, as a user without namespaces."""
    config = make_config(folder, verifier="python_code", options=options)
    (folder / "run").mkdir()
    write_run_config(config, folder / "run.yaml")
    if os.geteuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, ORDINARY_UID, ORDINARY_UID)
    uid = ORDINARY_UID if os.geteuid() == 0 else os.geteuid()
    command = [sys.executable, "-c", START, str(uid), str(folder / "run.yaml")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@on_linux
def test_code_is_refused_unless_the_run_file_allows_it(folder: Path) -> None:
    process = start(folder)
    output, _ = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 78
    assert "could change this user's files, checkpoints and Redis included" in output
    assert "allow_shared_uid" in output


@on_linux
def test_what_remains_open_is_logged_when_the_run_file_allows_it(folder: Path) -> None:
    process = start(folder, allow_shared_uid=True)
    assert process.stdout is not None
    lines = []
    deadline = time.monotonic() + WAIT_SECONDS
    for line in process.stdout:
        lines.append(line)
        if "code_is_confined_in_part" in line or time.monotonic() > deadline:
            break
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=WAIT_SECONDS)
    said = lines[-1]
    assert "code_is_confined_in_part" in said, "".join(lines)
    assert "use every folder and socket that its uid or all users may" in said
    assert "the ports of this run on loopback" in said
    assert "each with its own memory limit" not in said, "the filter of system calls needs no namespace"
