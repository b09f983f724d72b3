"""A Redis of one's own: restored from an older dump, then emptied, by the commands of docs/backup.md."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from rollmesh.store.embedded import find_server_binary

from ..kit.waiting import until
from .conftest import WAIT_SECONDS, interrupted

pytestmark = pytest.mark.long

DOCUMENT = Path(__file__).parents[2] / "docs" / "backup.md"
RUN = "small"
STEPS = 40
"""More than it gets to before its last start, at the pace of the first ones."""


@dataclass
class Server:
    """A Redis as an operator runs one."""

    folder: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        return self.folder / "s"

    def start(self, *options: str) -> None:
        """Start it, by default with an append-only file."""
        options = options or ("--appendonly", "yes")
        command = ["redis-server", "--port", "0", "--unixsocket", str(self.socket), "--dir", str(self.folder), *options]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, executable=find_server_binary(), stdout=log, stderr=log)
        until(self.answers, (self.folder / "log").read_text)

    def answers(self) -> bool:
        try:
            with redis.Redis(unix_socket_path=str(self.socket)) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def documented(self, words: str) -> None:
        """Run the line of the document that holds these words, on this server."""
        (line,) = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("redis-") and words in line]
        line = re.sub(r"\s+#.*$", "", line).replace("{RUN}", f"{{{RUN}}}").replace("/data", str(self.folder))
        line = line.replace("redis-cli", f"redis-cli -s {self.socket}")
        subprocess.run(["bash", "-eo", "pipefail", "-c", line], check=True, timeout=WAIT_SECONDS)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    if shutil.which("redis-cli") is None:
        pytest.skip("no redis-cli on PATH (apt-get install redis-tools)")
    folder = tmp_path / "redis"
    folder.mkdir()
    found = Server(folder)
    yield found
    found.end()


def test_a_run_continues_with_an_older_redis_and_with_an_empty_one(server: Server, started, wait_until) -> None:
    sections = {
        "trainer": {"train_steps": STEPS},
        "generator": {"pace": [[1, 0.02]]},
        "evaluation": {"before_and_after": False},
        # Each time that Redis comes back as another server, nothing is leased until a session would have expired.
        "store": {"url": f"unix://{server.socket}", "heartbeat_seconds": 1.0, "session_ttl_seconds": 5.0},
    }

    server.start()
    line, process = started(**sections)
    line.trains(process, 2)
    server.documented("bgsave")
    wait_until((server.folder / "dump.rdb").exists, "the dump", process)
    dump = server.folder.parent / "dump.rdb"
    shutil.copy(server.folder / "dump.rdb", dump)
    line.trains(process, 2)
    interrupted(process)

    server.end()
    shutil.rmtree(server.folder)
    server.folder.mkdir()
    shutil.copy(dump, server.folder / "dump.rdb")
    server.start("--appendonly", "no")
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        assert client.dbsize() > 0, "the dump was loaded"
        server.documented("appendonly yes")
        assert client.config_get("appendonly") == {"appendonly": "yes"}
    line, process = started(**sections)
    line.trains(process, 2)
    interrupted(process)

    server.documented("unlink")
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        assert client.dbsize() == 0, "the queue is forgotten"
    line.succeeds("up", str(line.run_file), "--set", "generator.pace=null")
    assert line.steps == list(range(1, STEPS + 1))
    assert line.audit()
