"""A Docker engine for the tests: the one that runs here, else one of our own, in a folder of its own.

Nothing is pulled: the base image is made by debootstrap from Debian's packages.
"""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BASE = "rollmesh-test-base"
_PACKAGES = "ca-certificates,python3,python3-venv"
_START_SECONDS = 60.0


class NoEngine(Exception):
    """No Docker engine can run here, for the reason in the message."""


@dataclass(frozen=True)
class Engine:
    """``docker`` against one engine."""

    binary: str
    host: str | None

    @property
    def environment(self) -> dict[str, str]:
        extra = {"DOCKER_HOST": self.host} if self.host else {}
        return {**os.environ, "DOCKER_BUILDKIT": "1", **extra}

    def __call__(self, *words: str, check: bool = True, timeout: float = 900.0) -> str:
        done = subprocess.run(
            [self.binary, *words], capture_output=True, text=True, env=self.environment, timeout=timeout, check=False
        )
        if check and done.returncode:
            raise AssertionError(f"docker {' '.join(words)}\n{done.stdout[-4000:]}\n{done.stderr[-6000:]}")
        return done.stdout.strip()

    def answers(self) -> bool:
        with contextlib.suppress(AssertionError, OSError, subprocess.TimeoutExpired):
            return bool(self("info", "--format", "{{.ServerVersion}}", timeout=20))
        return False


@contextlib.contextmanager
def running_engine(folder: Path) -> Iterator[Engine]:
    """The engine of this machine, or one that lives as long as the block; NoEngine says why there is none."""
    found = Engine(_client(), None)
    if found.answers():
        yield found
        return
    daemon = shutil.which("dockerd") or shutil.which("dockerd", path="/usr/sbin:/usr/local/sbin")
    if daemon is None:
        raise NoEngine("no Docker engine answers, and there is no dockerd to start one (Debian: docker.io)")
    if os.geteuid() != 0:
        raise NoEngine("no Docker engine answers, and only root can start one")
    engine = Engine(found.binary, f"unix://{folder / 'docker.sock'}")
    command = [daemon, "--host", str(engine.host), "--data-root", str(folder / "data")]
    command += ["--exec-root", str(folder / "exec"), "--pidfile", str(folder / "pid")]
    with (folder / "dockerd.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            _await_answer(engine, process, folder / "dockerd.log")
            yield engine
        finally:
            process.terminate()
            process.wait(timeout=60)
            shutil.rmtree(folder / "data", ignore_errors=True)


def _client() -> str:
    # Debian's own client builds with BuildKit; a newer client beside it may lack the plugin for that.
    for candidate in ("/usr/bin/docker", shutil.which("docker")):
        if candidate and Path(candidate).exists():
            return candidate
    raise NoEngine("there is no docker command (Debian: docker.io)")


def _await_answer(engine: Engine, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not engine.answers():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            lines = [line for line in log.read_text(errors="replace").splitlines() if "level=fatal" in line]
            why = lines[-1] if lines else log.read_text(errors="replace")[-500:]
            raise NoEngine(f"dockerd cannot start here: {why}")
        time.sleep(0.2)


def import_base(engine: Engine, cache: Path) -> str:
    """The base image: a minimal Debian with Python, made once and kept as an archive in ``cache``."""
    archive = cache / "base-bookworm.tar"
    if not archive.exists():
        if shutil.which("debootstrap") is None:
            raise NoEngine("no base image can be made: debootstrap is missing (Debian: debootstrap)")
        if os.geteuid() != 0:
            raise NoEngine("no base image can be made: debootstrap needs root")
        _make_base(archive)
    engine("import", str(archive), f"{BASE}:latest")
    return f"{BASE}:latest"


def _make_base(archive: Path) -> None:
    archive.parent.mkdir(parents=True, exist_ok=True)
    root = archive.parent / "root"
    shutil.rmtree(root, ignore_errors=True)
    command = ["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise NoEngine(f"no base image can be made: debootstrap: {done.stdout[-800:]}{done.stderr[-400:]}")
    for waste in ("var/cache/apt/archives", "var/lib/apt/lists"):
        shutil.rmtree(root / waste, ignore_errors=True)
    temporary = archive.with_suffix(".new")
    subprocess.run(["tar", "--create", "--file", temporary, "--directory", root, "."], check=True, timeout=300)
    temporary.replace(archive)
    shutil.rmtree(root, ignore_errors=True)
