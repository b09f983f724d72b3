"""Helm, the schemas, and every rendering of the chart that the tests look at."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rollmesh.store.embedded import find_server_binary

from ...kit.environments import NotInstalled
from .rendering import CHART, EXAMPLES, Helm, Rendering
from .tools.install import find_tools


@pytest.fixture(scope="session")
def tools() -> Path:
    """The folder with Helm and the schemas; skips with the reason where they cannot be had."""
    try:
        return find_tools()
    except NotInstalled as error:
        pytest.skip(str(error))


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
