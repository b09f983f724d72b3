"""A real server for the tests of the trajectory queue: one per session, a fresh run name per test."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rollmesh.config.store import StoreConfig
from rollmesh.store import EmbeddedOptions, EmbeddedServer, TrajectoryStore

_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    embedded = EmbeddedServer(tmp_path_factory.mktemp("redis"), EmbeddedOptions(maxmemory_bytes=1 << 30))
    embedded.start()
    yield embedded
    embedded.kill()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server that the test may kill, stop and reconfigure."""
    embedded = EmbeddedServer(tmp_path / "redis", EmbeddedOptions(maxmemory_bytes=1 << 26))
    embedded.start()
    yield embedded
    embedded.kill()


@pytest.fixture
async def store(server: EmbeddedServer) -> AsyncIterator[TrajectoryStore]:
    async with await TrajectoryStore.connect(StoreConfig(), run=f"run-{next(_NUMBERS)}", url=server.url) as connected:
        yield connected


@pytest.fixture
def durable_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server whose kill loses nothing. With a flush a second it may lose answers given while the disk was slow."""
    embedded = EmbeddedServer(tmp_path / "redis", EmbeddedOptions(appendfsync="always", maxmemory_bytes=1 << 26))
    embedded.start()
    yield embedded
    embedded.kill()


@pytest.fixture
async def durable_store(durable_server: EmbeddedServer) -> AsyncIterator[TrajectoryStore]:
    async with await TrajectoryStore.connect(StoreConfig(), run="recovery", url=durable_server.url) as connected:
        yield connected


@pytest.fixture
async def another_client(server: EmbeddedServer, store: TrajectoryStore) -> AsyncIterator[TrajectoryStore]:
    """A second process's view of the queue of ``store``: nothing is remembered between the two."""
    run = store.connection.keys.run
    async with await TrajectoryStore.connect(StoreConfig(), run=run, url=server.url) as connected:
        yield connected
