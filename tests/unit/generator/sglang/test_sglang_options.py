"""The SGLang section of a run file and the command that follows from it."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollmesh.config import load_run_config, write_run_config
from rollmesh.errors import ConfigError
from rollmesh.generator.engines.sglang.api import IDLE_CONNECTION_SECONDS
from rollmesh.generator.engines.sglang.sglang_options import SglangOptions


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


@pytest.mark.parametrize(
    ("generator", "message"),
    [
        ({"pace": [[1, 0.01]]}, "generator.pace"),
        ({"replicas": 2, "sglang": {"url": "http://h:1"}}, "generator.replicas=2"),
        ({"device": "cpu", "sglang": {"url": "http://h:1"}}, "generator.device=cpu"),
        ({"sglang": {"url": "h:1"}}, "expected http"),
        ({"sglang": {"url": "http://8.8.8.8:1"}}, "unencrypted over a public network"),
        ({"sglang": {"url": "http://[2001:4860:4860::8888]:1"}}, "unencrypted over a public network"),
        ({"sglang": {"url": "http://h:1", "python": "/x"}}, "generator.sglang.python"),
        ({"sglang": {"url": "http://h:1", "arguments": ["--tp-size", "2"]}}, "generator.sglang.arguments"),
        ({"sglang": {"url": "http://h:1", "environment": {"A": "b"}}}, "generator.sglang.environment"),
        ({"sglang": {"arguments": ["--port", "3"]}}, "--port .* is set by rollmesh"),
        ({"sglang": {"arguments": ["--dtype=auto"]}}, "--dtype .* is set by rollmesh"),
        ({"sglang": {"arguments": ["--hos", "0.0.0.0"]}}, "--hos .--host. is set by rollmesh"),
        ({"sglang": {"arguments": ["--admin-api=x"]}}, "--admin-api .--admin-api-key. is set by rollmesh"),
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
