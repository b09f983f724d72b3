"""Helm, the schemas, and every rendering of the chart that the tests look at."""

import shutil
from pathlib import Path

import pytest

from rollmesh.store.embedded import find_server_binary

from ...kit.environments import python_of
from .rendering import CHART, EXAMPLES, Helm, Rendering


@pytest.fixture(scope="session")
def tools() -> Path:
    """The folder with Helm and the schemas; skips with the reason where they cannot be had."""
    return python_of("chart-tools").parents[1]


@pytest.fixture(scope="session", params=["helm3", "helm4"])
def helm(request: pytest.FixtureRequest, tools: Path) -> Helm:
    """Both major versions of Helm, one after the other."""
    return Helm(tools / "bin" / request.param)


@pytest.fixture(scope="session")
def helm4(tools: Path) -> Helm:
    """The newer Helm alone, for what does not depend on its version."""
    return Helm(tools / "bin" / "helm4")


@pytest.fixture(scope="session")
def renderings(helm4: Helm) -> list[Rendering]:
    """The chart with every example."""
    return [helm4.template(CHART, [example]) for example in EXAMPLES]


@pytest.fixture
def commands(tmp_path: Path) -> str:
    """PATH with the server that the image of Redis has: redis-server of this machine, else the embedded one."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "redis-server").symlink_to(shutil.which("redis-server") or find_server_binary())
    return f"{folder}:/usr/local/bin:/usr/bin:/bin"
