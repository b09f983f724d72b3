"""Adapters in a server that rollmesh did not start: its flags, its leftovers and its restart."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollmesh.config.model import AdapterConfig
from rollmesh.generator.engines.engine_protocol import EngineLost, OnNewVersion
from rollmesh.generator.engines.policy_folders import AdapterSettings
from rollmesh.generator.engines.sglang.sglang_engine import SglangEngine

from ...contract.contract_kit import KEY, LONGEST, StandIn, write_model
from ...kit.adapters import ALL_LINEAR, ALPHA, RANK, merge, write_adapter
from ...kit.generation import collect, make_call
from ...sglang_cpu.options import sglang_options

pytestmark = pytest.mark.long

FLAGS = (
    *("--enable-lora", "--lora-strict-loading", "--max-lora-rank", str(RANK), "--max-loaded-loras", "16"),
    *("--lora-target-modules", *ALL_LINEAR),
)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_model(tmp_path / "base", 0)


@pytest.fixture
def folders(tmp_path: Path, base: Path) -> dict[int, Path]:
    return {version: write_adapter(tmp_path / f"adapter-{version}", base, version) for version in (1, 2)}


@pytest.fixture
def server(tmp_path: Path, base: Path) -> Iterator[StandIn]:
    stand_in = StandIn(base, tmp_path / "server.log", FLAGS)
    yield stand_in
    stand_in.stop()


def engine_at(url: str) -> SglangEngine:
    adapter = AdapterSettings(config=AdapterConfig(rank=RANK, alpha=ALPHA), kept_versions=2)
    # Probes are off: the requests of the tests find a restarted server.
    fields: dict[str, Any] = {"slots": 4, "max_context_tokens": LONGEST, "adapter": adapter, "probe_seconds": 3600.0}
    return SglangEngine(sglang_options(url=url, admin_key=KEY, **fields))


async def serve(engine: SglangEngine, folders: dict[int, Path], version: int) -> None:
    await engine.stage(folders[version], version)
    await engine.load(folders[version], version, OnNewVersion.NEXT_SLICE)


async def test_a_server_that_lost_its_adapters_ends_the_engine_and_the_next_one_loads_them_again(
    tmp_path, base, folders, server
):
    first = engine_at(server.url)
    await first.start(base, 0)
    await serve(first, folders, 1)
    await asyncio.to_thread(server.restart)
    with pytest.raises(EngineLost, match="has lost policy-v1; was it restarted"):
        await collect(first, make_call())
    with pytest.raises(EngineLost):
        first.status()
    await first.aclose()
    second = engine_at(server.url)
    await second.start(base, 0)
    await serve(second, folders, 1)
    rollout = await collect(second, make_call())
    assert rollout.stamps == {(1, 1)}
    rollout.check_pure([base, merge(tmp_path / "merged", base, folders[1])])
    await second.aclose()
