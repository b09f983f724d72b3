"""Real processes without the seconds of imports: each is a fork of a template that has done nothing but import.

It has its own id, environment, event loop and files, and death by kill -9. It shares with its template what Python and
the imported packages read from the environment when they start: the seed of string hashes (a template may be asked for
by it) and the number of threads. Starts themselves, imports included, are tested where ``subprocess`` is used.
"""

import itertools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

TRAINER = ("rollmesh.trainer.main", "transformers.models.qwen2.modeling_qwen2")
"""Modules that a trainer of the tests has imported once it trains."""
GENERATOR = (
    "rollmesh.generator.main",
    "rollmesh.generator.engines.torch.torch_engine",
    "rollmesh.checkpoints.checkpoint_store",
)
"""Modules that a generator with the torch engine has imported once it serves."""
GATEWAY = ("rollmesh.cli.main", "rollmesh.gateway.main")
"""Modules that a gateway has imported once it serves."""

_ROOT = Path(__file__).parents[2]
_NUMBERS = itertools.count()
_START_SECONDS = 240.0
_END_SECONDS = 30.0
_OPEN: "dict[tuple[object, ...], Template]" = {}


class WarmProcess:
    """The part of ``subprocess.Popen`` that the tests use, for a process of a template."""

    def __init__(self, pid: int, status: Path) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        if self.returncode is None and self._status.exists():
            self.returncode = int(self._status.read_text())
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (60.0 if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 60.0)
            time.sleep(0.002)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                return  # it has just ended, and its status is being read

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Template:
    """Starts processes in which ``modules`` are imported already."""

    def __init__(self, *modules: str, seed: int | None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")
        command = [sys.executable, "-u", str(_ROOT / "tests/kit/warm_template.py"), str(_ROOT), *modules]
        # torch reads the number of threads when it is imported.
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if seed is not None:
            environment["PYTHONHASHSEED"] = str(seed)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def start(
        self, module: str, arguments: Sequence[str], *, output: Path, environment: Mapping[str, str]
    ) -> WarmProcess:
        """Run ``python -m module *arguments`` with this environment; ``output`` gets what it prints."""
        status = Path(self._folder.name) / str(next(_NUMBERS))
        request = {
            "module": module,
            "arguments": list(arguments),
            "environment": dict(environment),
            "output": str(output),
            "status": str(status),
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], _START_SECONDS)
        if not ready:  # its late answer would be taken for that of the next start
            self._process.stdin.close()
            self._end()
        assert ready, f"the template of {module} has not answered for {_START_SECONDS:.0f} s"
        answer = self._process.stdout.readline()
        assert answer, f"the template of {module} ended with {self._process.wait(10)}"
        return WarmProcess(int(answer), status)

    def close(self) -> None:
        """End the template; its processes are left alone."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(_END_SECONDS)
        finally:
            self._end()

    def _end(self) -> None:
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait(_END_SECONDS)
        self._process.stdout.close()
        self._folder.cleanup()


def template(*modules: str, seed: int | None = None) -> Template:
    """The template with these modules, started when it is asked for first; it ends with the test session."""
    made = _OPEN.get((*modules, seed))
    if made is None or not made.alive:
        made = _OPEN[(*modules, seed)] = Template(*modules, seed=seed)
    return made


def start_service(service: str, folder: Path, index: int, *, warm: bool) -> subprocess.Popen[bytes] | WarmProcess:
    """Start a service of a run folder: in a new interpreter, or ``warm`` (a generator with the torch engine)."""
    arguments = [service, str(folder / "run.yaml"), "--index", str(index)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    output = folder / f"{service}-{index}.log"
    if warm:
        return template(*GENERATOR).start("rollmesh.cli.main", arguments, output=output, environment=environment)
    command = [sys.executable, "-m", "rollmesh.cli.main", *arguments]
    with output.open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def close_templates() -> None:
    """End all templates."""
    while _OPEN:
        _OPEN.popitem()[1].close()
