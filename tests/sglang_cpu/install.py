"""Makes the environment in which tests run the real SGLang server on a CPU, or tells where it is.

    python install.py            make it unless it is there; prints what it does; exit 1 when it cannot be made
    python install.py --check    print the path of its python, or the reason why there is none (exit 1)

The environment is a venv of its own, because SGLang's requirements and ours differ. It lies in the user's cache folder
under a name with a digest of everything that decides its contents, so checkouts of equal requirements share it and a
change makes a new one. It is built in place under a lock; the file COMPLETE is written last, and a folder without it is
deleted and built again. Standard library only.
"""

from __future__ import annotations

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
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
REQUIREMENTS, NO_DEPS, CONSTRAINTS = HERE / "requirements.txt", HERE / "no_deps.txt", HERE / "constraints.txt"
SHIMS = HERE / "shims"
PREFIX = "sglang-cpu-"
# An environment of other requirements may serve another checkout right now: it goes only after so long without use.
UNUSED_SECONDS = 3 * 3600
BUILD_SECONDS = 2400


class NotInstalled(Exception):
    """There is no usable environment; the text says why."""


def cache_folder() -> Path:
    """Return the folder of this project's environments."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollmesh"


def environment_folder() -> Path:
    """The folder of the environment that belongs to this checkout and this Python; it need not exist."""
    digest = hashlib.sha256(f"{platform.python_implementation()} {platform.python_version()}".encode())
    digest.update(platform.machine().encode())
    files = [REQUIREMENTS, NO_DEPS, CONSTRAINTS]
    files += sorted(path for path in SHIMS.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    for path in files:
        digest.update(f"\0{path.relative_to(HERE)}\0".encode() + path.read_bytes())
    return cache_folder() / f"{PREFIX}{digest.hexdigest()[:12]}"


def find_python() -> Path:
    """The python of the complete environment; raises NotInstalled."""
    folder = environment_folder()
    complete, failed = folder / "COMPLETE", _failure_file(folder)
    if not complete.exists():
        reason = failed.read_text().strip() if failed.exists() else "it has not been made yet (make sglang-env)"
        raise NotInstalled(f"no SGLang environment at {folder}: {reason}")
    python = folder / "bin" / "python"
    if not python.exists():
        raise NotInstalled(
            f"the SGLang environment at {folder} is broken: its python is gone; delete it and install again"
        )
    complete.touch()
    return python


def install() -> Path:
    """Make the environment unless it is there, and return its python; raises NotInstalled."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    with _lock():
        with contextlib.suppress(NotInstalled):
            return find_python()
        folder = environment_folder()
        _remove_unused(folder)
        started = time.monotonic()
        try:
            _build(folder, started + BUILD_SECONDS)
        except (NotInstalled, OSError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            _failure_file(folder).write_text(f"{error}\n")
            raise NotInstalled(str(error)) from error
        _failure_file(folder).unlink(missing_ok=True)
        _say(f"complete after {time.monotonic() - started:.0f} s: {folder}")
        return find_python()


def _build(folder: Path, deadline: float) -> None:
    if sys.platform != "linux":
        raise NotInstalled(f"SGLang has no wheel for {sys.platform}")
    _say(f"making {folder} with Python {platform.python_version()}")
    shutil.rmtree(folder, ignore_errors=True)
    python = folder / "bin" / "python"
    pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--constraint", CONSTRAINTS]
    torch = next(line for line in REQUIREMENTS.read_text().splitlines() if line.startswith("torch=="))
    _run("create it", [sys.executable, "-m", "venv", folder], deadline)
    # torch on its own first: what needs it then finds this build of it and brings no other.
    _run("install torch", [*pip, torch], deadline)
    _run("install the requirements", [*pip, "--requirement", REQUIREMENTS], deadline)
    _run("install SGLang", [*pip, "--no-deps", "--requirement", NO_DEPS], deadline)
    site_packages = next(folder.glob("lib/python*/site-packages"))
    shutil.copytree(SHIMS, site_packages, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    _run("load the server's command line", [python, "-m", "sglang.launch_server", "--help"], deadline)
    (folder / "COMPLETE").touch()


def _run(step: str, command: list[str | Path], deadline: float) -> None:
    """One step, within what is left of the deadline; raises NotInstalled with the end of what it printed."""
    started = time.monotonic()
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    # Neither our own venv nor the user's PYTHONPATH may leak into the new environment.
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
            close_fds=False,
            timeout=max(1.0, deadline - started),
        )
    except subprocess.TimeoutExpired as error:
        raise NotInstalled(f"could not {step}: no end after {time.monotonic() - started:.0f} s") from error
    if done.returncode != 0:
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        said = [line for line in lines if line.startswith("ERROR")] or lines
        raise NotInstalled(f"could not {step} (exit {done.returncode}): {' | '.join(said[-3:])}")
    _say(f"{step}: {time.monotonic() - started:.0f} s")


def _remove_unused(current: Path) -> None:
    """Delete environments of other requirements that were not used for a while, and their notes of failure."""
    for folder in sorted(cache_folder().glob(f"{PREFIX}*")):
        if folder == current or not folder.is_dir():
            continue
        complete = folder / "COMPLETE"
        used = (complete if complete.exists() else folder).stat().st_mtime
        if time.time() - used > UNUSED_SECONDS:
            _say(f"removing the unused {folder}")
            shutil.rmtree(folder, ignore_errors=True)
            _failure_file(folder).unlink(missing_ok=True)


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    """One build at a time. The steps inherit the lock: it is free when the build and its last step have ended,
    killed or not."""
    with (cache_folder() / f"{PREFIX[:-1]}.lock").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("waiting for another build to end")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _failure_file(folder: Path) -> Path:
    return folder.with_name(folder.name + ".failed")


def _say(text: str) -> None:
    print(f"sglang-cpu: {text}", flush=True)


def main() -> int:
    """Exit status: 0 with an environment, 1 without."""
    parser = argparse.ArgumentParser(description="The environment in which tests run the real SGLang server on a CPU.")
    parser.add_argument("--check", action="store_true", help="only tell where its python is, or why there is none")
    arguments = parser.parse_args()
    try:
        python = find_python() if arguments.check else install()
    except (NotInstalled, OSError) as error:
        print(f"sglang-cpu: {error}", file=sys.stderr)
        return 1
    print(python)
    return 0


if __name__ == "__main__":
    sys.exit(main())
