"""A real Redis, a populated run, and a real gateway process in front of it."""

import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import pytest

from rollmesh.config import load_run_config
from rollmesh.config.recipes import resolve_model
from rollmesh.config.store import StoreConfig
from rollmesh.store import EmbeddedServer, TrajectoryStore
from rollmesh.text import Tokenizer

from .gateway_scene import RunningGateway, Scene, start_gateway, write_run_file

_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve_model("recipe:countdown"))


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write_run_file(tmp_path, f"gateway-{next(_NUMBERS)}")


@pytest.fixture
async def scene(run_file: Path, server: EmbeddedServer, tokenizer: Tokenizer) -> AsyncIterator[Scene]:
    config = load_run_config(run_file)
    async with await TrajectoryStore.connect(StoreConfig(), run=config.name, url=server.url) as store:
        yield await Scene.begin(store, config, tokenizer)


@pytest.fixture
def started(server: EmbeddedServer) -> Iterator[Callable[..., RunningGateway]]:
    """Start gateways; whatever still runs is killed at the end."""
    running: list[RunningGateway] = []

    def start(run_file: Path, store_url: str | None = None, **environment: str) -> RunningGateway:
        running.append(start_gateway(run_file, store_url or server.url, environment))
        return running[-1]

    yield start
    for gateway in running:
        if gateway.process.poll() is None:
            gateway.process.kill()
            gateway.process.wait()


@pytest.fixture
def gateway(scene: Scene, run_file: Path, started: Callable[..., RunningGateway]) -> RunningGateway:
    """A gateway in front of the scene."""
    return started(run_file)


@pytest.fixture
async def client(scene: Scene, gateway: RunningGateway) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the gateway, with the token of the run folder."""
    token = (Path(scene.config.folder) / "gateway-token").read_text()
    async with gateway.client(headers={"Authorization": f"Bearer {token}"}) as connected:
        yield connected
