"""A real server and a tiny random model for the trainer's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollmesh.store import EmbeddedServer

from ...kit.redis_servers import running_server
from .trainer_run import Runs, write_tiny_model

_TEST_SECONDS = 900
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every deadline inside of a test passes first and says what it waited for."""
    for item in items:
        if item.path.is_relative_to(_HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_TEST_SECONDS))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 with a few thousand parameters."""
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    return folder


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server of the test's own, that it may kill."""
    with running_server(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def runs(tmp_path: Path, tiny_model: Path, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(tmp_path, tiny_model, server, monkeypatch)
