"""The SGLang section of a run file and the command that follows from it."""

import asyncio
import itertools
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollmesh.config import load_run_config, write_run_config
from rollmesh.config.model import AdapterConfig
from rollmesh.errors import ConfigError, EngineError
from rollmesh.generator.engines.policy_folders import AdapterSettings
from rollmesh.generator.engines.sglang.loaded_adapters import LoadedAdapters
from rollmesh.generator.engines.sglang.server_api import IDLE_CONNECTION_SECONDS
from rollmesh.generator.engines.sglang.sglang_options import SglangOptions, check_lora_server, lora_flags

from ....sglang_cpu.options import sglang_options


def load(tmp_path: Path, environ: dict[str, str] | None = None, **generator: Any):
    data = {
        "name": "run",
        "folder": str(tmp_path),
        "model": {"path": "m", "dtype": "bfloat16"},
        "data": {"max_prompt_tokens": 16},
        "rollout": {"max_new_tokens": 100},
        "generator": {"engine": "sglang", "max_context_tokens": 256, "slots": 4, **generator},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(data))
    return load_run_config(tmp_path / "run.yaml", environ=environ or {})


def flags(options: SglangOptions) -> dict[str, str]:
    command = options.command(Path("/policies/7"), 7, 3000)
    assert command[1:3] == ["-m", "sglang.launch_server"]
    rest = [*command[3:], "--"]
    return {a: "" if b.startswith("--") else b for a, b in itertools.pairwise(rest) if a.startswith("--")}


def test_the_command_serves_the_folder_on_loopback_with_a_key_of_its_own(tmp_path):
    first, second = (SglangOptions.from_config(load(tmp_path), index) for index in (0, 1))
    found = flags(first)
    assert found["--model-path"] == "/policies/7" and found["--weight-version"] == "7"
    assert (found["--host"], found["--port"], found["--dtype"]) == ("127.0.0.1", "3000", "bfloat16")
    # Room beside the calls: for the canary, and for what the server keeps back of its cache.
    assert int(found["--max-running-requests"]) >= 4 + 8 and int(found["--max-total-tokens"]) >= 4 * 256 + 512
    assert int(found["--context-length"]) > 256
    assert "--skip-tokenizer-init" in found and "--disable-overlap-schedule" not in found
    assert first.admin_key not in first.command(Path("p"), 0, 1)
    assert found["--config"] == str(first.key_file)
    assert yaml.safe_load(first.key_text()) == {"api-key": first.admin_key, "admin-api-key": first.admin_key}
    assert len(first.admin_key) == 32 and first.admin_key != second.admin_key
    assert first.log_file == tmp_path / "logs" / "sglang-0.log"
    assert "--device" not in found


def test_a_kept_cache_needs_the_schedule_without_overlap(tmp_path):
    options = SglangOptions.from_config(load(tmp_path, on_new_version="keep_kv"), 0)
    assert "--disable-overlap-schedule" in flags(options)
    assert int(flags(options)["--watchdog-timeout"]) > 3600
    given = {"arguments": ["--watchdog-timeout", "900"]}
    options = SglangOptions.from_config(load(tmp_path, on_new_version="keep_kv", sglang=given), 0)
    assert flags(options)["--watchdog-timeout"] == "900"


def test_flags_of_the_run_file_are_passed_on(tmp_path):
    arguments = ["--tp-size", "8", "--nnodes", "2", "--attention-backend=fa3"]
    options = SglangOptions.from_config(load(tmp_path, device="cpu", sglang={"arguments": arguments}), 0)
    command = options.command(Path("p"), 0, 1)
    assert command[-len(arguments) :] == arguments
    assert "torch_native" not in command


def test_the_server_gets_none_of_our_secrets_and_its_own_python(tmp_path):
    inherited = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}
    inherited |= {"PATH": "/bin", "ROLLMESH_STORE__PASSWORD": "x", "PYTHONPATH": "/ours", "VIRTUAL_ENV": "/ours"}
    config = load(tmp_path, sglang={"python": "/sg/bin/python", "environment": {"CUDA_VISIBLE_DEVICES": "1"}})
    options = SglangOptions.from_config(config, 0)
    found = options.server_environment(inherited)
    assert found["PATH"] == "/bin" and found["CUDA_VISIBLE_DEVICES"] == "1"
    assert found["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0"
    assert float(found["SGLANG_TIMEOUT_KEEP_ALIVE"]) > IDLE_CONNECTION_SECONDS
    assert not {"ROLLMESH_STORE__PASSWORD", "PYTHONPATH", "VIRTUAL_ENV"} & set(found)
    assert options.command(Path("p"), 0, 1)[0] == "/sg/bin/python"
    ours = SglangOptions.from_config(load(tmp_path), 0)
    assert ours.command(Path("p"), 0, 1)[0] == sys.executable
    assert ours.server_environment(inherited)["PYTHONPATH"] == "/ours"


@pytest.mark.parametrize(
    ("inherited", "lower", "upper"),
    [
        ({"no_proxy": "corp"}, "corp,127.0.0.1,localhost", "corp,127.0.0.1,localhost"),
        ({"no_proxy": "a", "NO_PROXY": "b"}, "a,127.0.0.1,localhost", "b,127.0.0.1,localhost"),
        ({"NO_PROXY": "*"}, "*", "*"),
        ({}, "127.0.0.1,localhost", "127.0.0.1,localhost"),
    ],
)
def test_what_the_server_asks_itself_does_not_go_to_an_http_proxy(tmp_path, inherited, lower, upper):
    options = SglangOptions.from_config(load(tmp_path), 0)
    found = options.server_environment({"http_proxy": "http://p:1", **inherited})
    assert (found["http_proxy"], found["no_proxy"], found["NO_PROXY"]) == ("http://p:1", lower, upper)
    given = load(tmp_path, sglang={"environment": {"no_proxy": "other"}})
    assert SglangOptions.from_config(given, 0).server_environment(inherited)["no_proxy"] == "other"


def drafts(algorithm: str, *more: str, device: str = "cuda") -> dict[str, Any]:
    return {"device": device, "sglang": {"arguments": ["--speculative-algorithm", algorithm, *more]}}


@pytest.mark.parametrize("algorithm", ["EAGLE3", "eagle3", "EAGLE", "NEXTN"])
def test_drafts_of_a_model_are_passed_through_on_cuda(tmp_path, algorithm):
    generator = drafts(algorithm, "--speculative-num-steps", "3", "--speculative-accept-threshold-single", "1.0")
    found = flags(SglangOptions.from_config(load(tmp_path, **generator), 0))
    assert (found["--speculative-algorithm"], found["--speculative-num-steps"]) == (algorithm, "3")


DRAFTING = {
    "device": "cuda",
    "speculative_algorithm": "EAGLE3",
    "speculative_accept_threshold_single": 1.0,
    "speculative_accept_threshold_acc": 1.0,
}


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"speculative_algorithm": "NGRAM"}, "http://h:1 .*NGRAM: .*token 0"),
        ({"speculative_algorithm": "UNO"}, "UNO is not known"),
        ({"speculative_accept_threshold_acc": 0.9}, "EAGLE3: .*never sampled"),
        ({"device": "xpu"}, "its device is xpu: .*argmax"),
        ({"device": "cpu", "speculative_algorithm": "FROZEN_KV_MTP"}, "its device is cpu"),
    ],
)
def test_a_running_server_whose_drafts_change_its_tokens_is_refused(tmp_path, info, message):
    options = SglangOptions.from_config(load(tmp_path, sglang={"url": "http://h:1"}), 0)
    assert options.cache_tokens(DRAFTING, "http://h:1") == 0
    assert options.cache_tokens(DRAFTING | {"device": "cpu", "speculative_algorithm": None}, "http://h:1") == 0
    with pytest.raises(ConfigError, match=message):
        options.cache_tokens(DRAFTING | info, "http://h:1")


@pytest.mark.parametrize(
    ("generator", "message"),
    [
        ({"pace": [[1, 0.01]]}, "generator.pace"),
        ({"replicas": 2, "sglang": {"url": "http://h:1"}}, "generator.replicas=2"),
        ({"device": "cpu", "sglang": {"url": "http://h:1"}}, "generator.device=cpu"),
        ({"sglang": {"url": "h:1"}}, "expected http"),
        ({"sglang": {"url": "http://8.8.8.8:1"}}, "unencrypted over a public network"),
        ({"sglang": {"url": "http://[2001:4860:4860::8888]:1"}}, "unencrypted over a public network"),
        ({"sglang": {"url": "http://h:1", "python": "/x"}}, "generator.sglang: python"),
        ({"sglang": {"url": "http://h:1", "arguments": ["--tp-size", "2"]}}, "generator.sglang: arguments"),
        ({"sglang": {"url": "http://h:1", "environment": {"A": "b"}}}, "generator.sglang: environment"),
        ({"sglang": {"arguments": ["--port", "3"]}}, "--port .* is set by rollmesh"),
        ({"sglang": {"arguments": ["--dtype=auto"]}}, "--dtype .* is set by rollmesh"),
        ({"sglang": {"arguments": ["--hos", "0.0.0.0"]}}, "--hos .--host. is set by rollmesh"),
        ({"sglang": {"arguments": ["--admin-api=x"]}}, "--admin-api .--admin-api-key. is set by rollmesh"),
        (drafts("NGRAM"), "generator.sglang: arguments: --speculative-algorithm NGRAM: .*token 0"),
        ({"device": "cuda", "sglang": {"arguments": ["--speculative-algo=ngram"]}}, "ngram: NGRAM drafts"),
        (drafts("DFLASH"), "DFLASH is not known"),
        (drafts("EAGLE3", device="cpu"), "generator.device=cpu: --speculative-algorithm EAGLE3 needs cuda.*argmax"),
        (drafts("NEXTN", device="auto"), "generator.device=auto: --speculative-algorithm NEXTN needs cuda"),
        (drafts("EAGLE3", "--speculative-accept-threshold-single", "0.9"), "EAGLE3: .* never sampled"),
        (drafts("EAGLE", "--speculative-accept-threshold-acc=0.5"), "EAGLE: .* never sampled"),
        ({"sglang": {"interrupt": "in_place"}}, "retract"),
        ({"sglang": {"start_timeout_seconds": 0}}, "start_timeout_seconds"),
    ],
)
def test_what_cannot_work_is_refused_by_name(tmp_path, generator, message):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, **generator)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1", "http://10.1.2.3:1", "http://[::1]:1", "http://sglang:1", "https://8.8.8.8:1"]
)
def test_a_private_address_a_name_and_https_are_taken(tmp_path, url):
    assert SglangOptions.from_config(load(tmp_path, sglang={"url": url}), 0).server.url == url


def test_a_cache_that_does_not_hold_one_call_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="kv_token_capacity=100"):
        SglangOptions.from_config(load(tmp_path, kv_token_capacity=100), 0)


def test_the_key_comes_from_the_environment_and_is_never_written(tmp_path):
    config = load(tmp_path, {"ROLLMESH_GENERATOR__SGLANG__ADMIN_KEY": "hunter2"}, sglang={"url": "http://h:1"})
    assert SglangOptions.from_config(config, 0).admin_key == "hunter2"
    write_run_config(config, tmp_path / "written.yaml")
    assert "hunter2" not in (tmp_path / "written.yaml").read_text()
    again = load_run_config(tmp_path / "written.yaml", environ={})
    assert SglangOptions.from_config(again, 0).admin_key is None


_ROOT = Path(__file__).parents[4]


def test_the_extra_pins_the_server_that_the_tests_run():
    extras = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (pin,) = (requirement.split(";")[0] for requirement in extras["sglang"])
    tested = (_ROOT / "tests" / "sglang_cpu" / "no_deps.txt").read_text().splitlines()
    assert pin.startswith("sglang==") and pin in tested


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
