"""A run that this machine cannot start is refused by validation, with the field, not by a service a minute later."""

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig, MistralConfig, PretrainedConfig

from rollmesh.config.recipes import resolve_model
from rollmesh.errors import ConfigError
from rollmesh.preflight import machine

from .test_run_checks import checked, run


@pytest.mark.parametrize(
    ("sections", "package", "message"),
    [
        ({"telemetry": {"trackers": ["wandb"]}}, "wandb", "telemetry.trackers: wandb: .*rollmesh\\[wandb\\]"),
        ({"checkpoints": {"folder": "s3://bucket/x"}}, "s3fs", "checkpoints.folder=s3://bucket/x: .*rollmesh\\[s3\\]"),
        ({"checkpoints": {"folder": "gs://bucket/x"}}, "gcsfs", "checkpoints.folder=gs://bucket/x: .*rollmesh\\[gs\\]"),
        ({"trainer": {"optimizer": "adamw_8bit"}}, "bitsandbytes", "trainer.optimizer=adamw_8bit: .*bitsandbytes"),
        (
            {"telemetry": {"otlp_endpoint": "http://c:4318"}},
            "opentelemetry.sdk",
            "telemetry.otlp_endpoint=http://c:4318: .*rollmesh\\[tracing\\]",
        ),
        ({}, "torch", "trainer.device=auto: requires the package torch: pip install 'rollmesh\\[torch\\]'"),
    ],
)
def test_a_package_that_is_not_installed_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], package: str, message: str
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == package else find_spec(name))
    with pytest.raises(ConfigError, match=message):
        checked(run(**sections))


def with_config(folder: Path, config: PretrainedConfig) -> str:
    """A folder of the model of the recipe that says it were another one."""
    shutil.copytree(resolve_model("recipe:countdown"), folder)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return str(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2Config(), "config.model_type='gpt2': the torch engine serves qwen2, qwen3, llama; .*engine=sglang"),
        (MistralConfig(), "config.model_type='mistral': the torch engine serves"),
        (LlamaConfig(hidden_act="gelu"), "config.hidden_act='gelu': only silu is supported"),
    ],
    ids=["gpt2", "mistral", "activation"],
)
def test_a_model_that_the_torch_engine_does_not_serve_is_refused_by_name(
    tmp_path: Path, config: PretrainedConfig, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(run(model={"path": with_config(tmp_path / "model", config)}))


@pytest.mark.parametrize(
    ("generator", "named"),
    [
        ({"slots": 65_536}, "generator.slots=65536 with generator.max_context_tokens=1024: .* GB of cache"),
        ({"kv_token_capacity": 10**9}, "generator.kv_token_capacity=1000000000: .* GB of cache"),
    ],
)
def test_a_cache_that_this_machine_can_never_hold_is_refused_by_its_fields(
    monkeypatch: pytest.MonkeyPatch, generator: dict[str, Any], named: str
) -> None:
    monkeypatch.setattr(machine, "_device_bytes", lambda _: 8 << 30)
    with pytest.raises(ConfigError, match=named):
        checked(run(generator={"device": "cpu", **generator}))
    checked(run(generator={"device": "cpu", "slots": 64}))
