"""Start of a generator process that fails."""

import socket
from pathlib import Path

import pytest

from rollmesh.config import RunConfig
from rollmesh.errors import ConfigError
from rollmesh.generator.engines.engine_protocol import EngineDeclaration
from rollmesh.generator.engines.engine_registry import ENGINES
from rollmesh.generator.engines.sglang.sglang_engine import SglangEngine
from rollmesh.generator.engines.sglang.sglang_options import SglangOptions
from rollmesh.generator.main import serve
from rollmesh.runtime.lifecycle import Shutdown


class WatchedEngine(SglangEngine):
    """The real engine; it notes that it was closed."""

    closed = False

    async def aclose(self) -> None:
        await super().aclose()
        self.closed = True


async def test_a_start_that_fails_after_the_engine_was_built_closes_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[WatchedEngine] = []

    def build(config: RunConfig, index: int) -> WatchedEngine:
        built.append(WatchedEngine(SglangOptions.from_config(config, index)))
        return built[0]

    monkeypatch.setitem(ENGINES, "sglang", EngineDeclaration(build=build))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = RunConfig.model_validate(
            {
                "name": "x",
                "folder": str(tmp_path),
                "model": {"path": "models/tiny"},
                "generator": {"engine": "sglang", "sglang": {"url": "http://127.0.0.1:1"}},
                "network": {"admin_port": port},
            }
        )
        with pytest.raises(ConfigError, match=f"{port}"):
            await serve(config, 0, Shutdown())
    assert [engine.closed for engine in built] == [True]
