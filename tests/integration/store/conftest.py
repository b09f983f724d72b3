"""A real server for the tests of the trajectory queue: one per session, a fresh run name per test."""

import itertools
from collections.abc import AsyncIterator

import pytest

from rollmesh.config.store import StoreConfig
from rollmesh.store import EmbeddedServer, TrajectoryStore

from .stored_keys import read_truth

_NUMBERS = itertools.count()


@pytest.fixture
async def store(server: EmbeddedServer) -> AsyncIterator[TrajectoryStore]:
    """A queue that must not contradict itself at the end of the test."""
    async with await TrajectoryStore.connect(StoreConfig(), run=f"run-{next(_NUMBERS)}", url=server.url) as connected:
        yield connected
        assert (await read_truth(connected)).problems == []


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
