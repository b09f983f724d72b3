"""A real Redis per session, a fresh run name per test."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rollmesh.config.services import StoreConfig
from rollmesh.store import EmbeddedOptions, EmbeddedServer, TrajectoryStore

_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    embedded = EmbeddedServer(tmp_path_factory.mktemp("redis"), EmbeddedOptions(maxmemory_bytes=1 << 28))
    embedded.start()
    yield embedded
    embedded.kill()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server that the test may kill."""
    embedded = EmbeddedServer(tmp_path / "redis", EmbeddedOptions(appendfsync="always", maxmemory_bytes=1 << 26))
    embedded.start()
    yield embedded
    embedded.kill()


@pytest.fixture
async def store(server: EmbeddedServer) -> AsyncIterator[TrajectoryStore]:
    name = f"rollout-{next(_NUMBERS)}"
    async with await TrajectoryStore.connect(StoreConfig(), run=name, url=server.url) as connected:
        yield connected
