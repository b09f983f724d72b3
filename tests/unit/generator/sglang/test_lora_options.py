"""Flags of a server for adapters, the check of a running one, and the names of what is loaded into it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollmesh.config.adapter import AdapterConfig
from rollmesh.errors import ConfigError, EngineError
from rollmesh.generator.engines.policy_folders import AdapterSettings
from rollmesh.generator.engines.sglang.loaded_adapters import LoadedAdapters
from rollmesh.generator.engines.sglang.sglang_options import check_lora_server, lora_flags

from ....sglang_cpu.options import sglang_options

SETTINGS = AdapterSettings(config=AdapterConfig(rank=8, alpha=16), kept_versions=3)
TARGETS = ("down_proj", "q_proj")
INFO = {
    "enable_lora": True,
    "max_lora_rank": 8,
    "lora_target_modules": ["q_proj", "down_proj", "up_proj"],
    "lora_strict_loading": True,
    "max_loaded_loras": 5,
}


def test_a_started_server_takes_every_version_that_slices_may_name():
    flags = lora_flags(SETTINGS, TARGETS, slots=64)
    assert flags[-3:] == ["--lora-target-modules", *TARGETS]
    named = dict(zip(flags[2:-3:2], flags[3:-3:2], strict=True))
    assert named == {"--max-lora-rank": "8", "--max-loras-per-batch": "5", "--max-loaded-loras": "69"}
    assert flags[:2] == ["--enable-lora", "--lora-strict-loading"]


def test_the_command_has_them_before_the_user_s_own_flags():
    fields = {"slots": 4, "max_context_tokens": 64, "device": "cpu", "adapter": SETTINGS}
    command = sglang_options(arguments=["--tp-size", "2"], **fields).command(Path("base"), 0, 1, TARGETS)
    at = command.index("--lora-target-modules")
    assert command[at + 1 :] == [*TARGETS, "--tp-size", "2"]
    assert command[command.index("--lora-backend") + 1] == "torch_native"
    own = sglang_options(arguments=["--lora-backend", "triton"], **fields).command(Path("base"), 0, 1, TARGETS)
    assert own.count("--lora-backend") == 1
    with pytest.raises(ValueError, match="--max-lora-rank .* is set by rollmesh"):
        sglang_options(arguments=["--max-lora-rank", "64"], **fields)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_lora": None}, "without --enable-lora; start it with --enable-lora --lora-strict-loading"),
        ({"dp_size": 2}, r"with --dp-size 2, which cannot load adapters while it runs \(leave it out\)"),
        ({"max_lora_rank": 4}, r"with --max-lora-rank 4, but model.adapter.rank=8; .* --max-lora-rank 8"),
        ({"lora_target_modules": ["q_proj"]}, "but the adapters have down_proj, too; .* down_proj q_proj"),
        ({"lora_strict_loading": False}, "without --lora-strict-loading, so it would ignore missing tensors"),
        ({"max_loaded_loras": 4}, "--max-loaded-loras 4, but the run keeps up to 5 adapters"),
    ],
)
def test_a_running_server_that_cannot_serve_the_adapters_is_refused_with_the_flags_to_add(changes, message):
    with pytest.raises(ConfigError, match=f"the SGLang server at http://gpu:1 was started .*{message}"):
        check_lora_server({**INFO, **changes}, "http://gpu:1", SETTINGS, TARGETS)


@pytest.mark.parametrize(
    "changes", [{}, {"dp_size": 1}, {"max_lora_rank": 64}, {"lora_target_modules": ["all"]}, {"max_loaded_loras": None}]
)
def test_a_running_server_with_room_for_the_adapters_is_used(changes):
    check_lora_server({**INFO, **changes}, "http://gpu:1", SETTINGS, TARGETS)


class Api:
    """Writes down the loads and unloads; rejects folders with ``bad`` in their name."""

    def __init__(self) -> None:
        self.answers: dict[str, str] = {}
        """Error messages of unloads, by name."""
        self.told: list[str] = []

    async def load_adapter(self, name: str, folder: str, seconds: float) -> str:
        self.told.append(f"load {name}")
        return "rank too large" if "bad" in folder else ""

    async def unload_adapter(self, name: str, seconds: float) -> str:
        self.told.append(f"unload {name}")
        return self.answers.get(name, "")

    async def model_names(self) -> list[str]:
        return ["/models/base", "policy-v3", "policy-v4-2"]


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture
def loaded(api: Api) -> LoadedAdapters:
    adapters = LoadedAdapters(SETTINGS, lambda: api, 60.0)  # type: ignore[arg-type, return-value]
    tensors: dict[str, Any] = {f"model.layers.0.mlp.{name}.weight": (8, 8) for name in ("up_proj", "down_proj")}
    adapters.start_above(tensors, 0)
    return adapters


async def serve(adapters: LoadedAdapters, version: int) -> None:
    await adapters.load(Path("folder"), version)
    adapters.retain(version)
    await asyncio.sleep(0)  # unloads are tasks of their own


async def test_the_newest_versions_stay_and_one_that_a_slice_names_goes_after_it(api, loaded):
    await serve(loaded, 1)
    with loaded.named(1) as name:
        assert name == "policy-v1"
        for version in range(2, 6):
            await serve(loaded, version)
        assert "unload policy-v1" not in api.told and "unload policy-v2" in api.told
        assert [loaded.has(version) for version in range(6)] == [True, True, False, True, True, True]
    await asyncio.sleep(0)
    assert api.told[-1] == "unload policy-v1" and not loaded.has(1)
    assert loaded.name(0) is None


async def test_a_return_to_a_version_that_waits_for_its_unload_keeps_it(api, loaded):
    for version in (1, 2, 3):
        await serve(loaded, version)
    with loaded.named(1):
        for version in (4, 5):
            await serve(loaded, version)
        await loaded.load(Path("folder"), 1)  # staged again
    await asyncio.sleep(0)
    assert "unload policy-v1" not in api.told and loaded.name(1) == "policy-v1"
    loaded.retain(1)
    assert loaded.has(1) and api.told.count("load policy-v1") == 1


async def test_an_unload_that_fails_is_tried_again_until_the_server_has_unloaded_it(api, loaded):
    api.answers["policy-v1"] = "Retry the unload"
    for version in range(1, 6):
        await serve(loaded, version)
    assert api.told.count("unload policy-v1") == 2
    api.answers["policy-v1"] = "LoRA with name policy-v1 does not exist"
    for _ in range(3):
        await serve(loaded, 5)
    assert api.told.count("unload policy-v1") == 3


async def test_a_name_never_returns(api, loaded):
    await serve(loaded, 1)
    await serve(loaded, 1)  # served and still loaded: nothing to do
    for version in range(2, 5):
        await serve(loaded, version)
    await serve(loaded, 1)
    assert [told for told in api.told if "v1" in told] == ["load policy-v1", "unload policy-v1", "load policy-v1-2"]
    await loaded.load(Path("folder"), 9)  # fails its canary, and is read again
    await loaded.load(Path("folder"), 9)
    await asyncio.sleep(0)
    assert api.told[-3:] == ["load policy-v9", "load policy-v9-2", "unload policy-v9"]
    assert loaded.name(9) == "policy-v9-2"


async def test_a_rejected_adapter_is_an_error_with_the_server_s_reason(loaded):
    with pytest.raises(EngineError, match="the SGLang server rejects policy version 7: rank too large"):
        await loaded.load(Path("bad"), 7)
    assert not loaded.has(7)


async def test_what_an_earlier_process_left_in_a_server_is_unloaded(api, loaded):
    api.answers["policy-v3"] = "in use"
    await loaded.unload_leftovers()
    assert api.told == ["unload policy-v3", "unload policy-v4-2"]
    for version in (3, 4, 5):
        await serve(loaded, version)
    loads = [told for told in api.told if told.startswith("load")]
    assert loads == ["load policy-v3-2", "load policy-v4-3", "load policy-v5"]
    assert api.told.count("unload policy-v3") > 1
