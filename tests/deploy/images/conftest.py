"""One Docker engine and one set of images for all tests of the folder.

Building takes minutes and gigabytes, so it is asked for: ROLLMESH_TEST_IMAGES=1, or `make images-test`.
"""

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from .engine import Engine, NoEngine, import_base, running_engine
from .pip_access import pip_secrets

ROOT = Path(__file__).parents[3]
TARGETS = ("gateway", "agents", "rollout", "reward", "generator-cpu", "trainer")
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rollmesh" / "images"


@dataclass
class Images:
    """Images that were built."""

    engine: Engine
    base: str
    seconds: dict[str, float] = field(default_factory=dict)

    def name(self, target: str) -> str:
        return f"rollmesh/{'generator' if target == 'generator-cpu' else target}:test"

    def megabytes(self, image: str) -> float:
        return int(self.engine("image", "inspect", "--format", "{{.Size}}", image)) / 1e6


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    if os.environ.get("ROLLMESH_TEST_IMAGES", "") in ("", "0"):
        pytest.skip("building images takes minutes: make images-test, or ROLLMESH_TEST_IMAGES=1")
    # Not below pytest's own folder: its path is too long for a socket, and it keeps what engines leave behind.
    with tempfile.TemporaryDirectory(prefix="rollmesh-engine-", ignore_cleanup_errors=True) as folder:
        try:
            with running_engine(Path(folder)) as found:
                yield found
        except NoEngine as error:
            pytest.skip(str(error))


@pytest.fixture(scope="session")
def images(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Images:
    """Every image that runs on a CPU, built from the Dockerfile."""
    try:
        built = Images(engine, import_base(engine, CACHE))
    except NoEngine as error:
        pytest.skip(str(error))
    with pip_secrets(tmp_path_factory.mktemp("pip")) as secrets:
        for target in TARGETS:
            build(built, target, built.base, secrets)
    return built


def build(images: Images, target: str, base: str, secrets: list[str], **arguments: str) -> None:
    """Build one target with deploy/build.sh; ``arguments`` are those of the Dockerfile."""
    variables = {"DOCKER": images.engine.binary, "VERSION": "test", "BASE_IMAGE": base, "TORCH": "torch==2.13.0"}
    start = time.monotonic()
    done = subprocess.run(
        [ROOT / "deploy" / "build.sh", target, "--", "--network", "host", "--progress", "plain", *secrets],
        capture_output=True,
        text=True,
        env={**images.engine.environment, **variables, **arguments},
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    images.seconds[target] = time.monotonic() - start
