"""A Redis of the run's own, and a launcher's client that retries as long as a test says."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollmesh.launcher.redis import embedded_server
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.store import EmbeddedServer

from .test_launcher_outages import config


@pytest.fixture
async def own(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    """The server of the run, which is up and stopped at the end."""
    server = embedded_server(config(tmp_path), RunFolder(tmp_path))
    await asyncio.to_thread(server.start)
    yield server
    await asyncio.to_thread(server.stop)
