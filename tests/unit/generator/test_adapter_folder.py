"""A PEFT folder is held to the run's rank, alpha and layers before an engine reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rollmesh.config.load import validate_run_config
from rollmesh.config.model import AdapterConfig
from rollmesh.errors import ConfigError, EngineError
from rollmesh.generator.engines.policy_folders import AdaptedLayers, AdapterSettings, adapted_layers, read_shapes

from ...kit.adapters import ALL_LINEAR, ALPHA, RANK, change_config, change_tensors, write_adapter
from .conftest import ModelMaker

_FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture
def base(model_folder: ModelMaker) -> Path:
    return model_folder("qwen3")


@pytest.fixture
def layers(base: Path) -> AdaptedLayers:
    return adapted_layers(read_shapes(base), AdapterConfig(rank=RANK, alpha=ALPHA))


@pytest.fixture
def adapter(tmp_path: Path, base: Path) -> Path:
    return write_adapter(tmp_path / "adapter", base, seed=1)


def test_all_linear_is_every_linear_layer_of_the_blocks_and_nothing_else(base: Path, layers: AdaptedLayers) -> None:
    assert layers.names == tuple(sorted(ALL_LINEAR))
    assert len(layers.layers) == 14 and all(".layers." in layer for layer in layers.layers)
    assert layers.tensors[_FIRST] == (RANK, 48)


def test_an_adapter_of_the_run_passes_with_unset_fields_of_other_methods(adapter: Path, layers: AdaptedLayers) -> None:
    layers.check(adapter)
    change_config(adapter, use_rslora=False, modules_to_save=None, alpha_pattern={})
    layers.check(adapter)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": 8}, r"r=8, model\.adapter\.rank is 4"),
        ({"lora_alpha": 16}, r"lora_alpha=16, model\.adapter\.alpha is 8"),
        ({"target_modules": ["q_proj"]}, r"target_modules=\['q_proj'\], model\.adapter\.target=all_linear"),
        ({"target_modules": "all-linear"}, "target_modules='all-linear' is refused: .* a list of names"),
        ({"peft_type": "VERA"}, "peft_type='VERA' is refused: only low-rank adapters are applied"),
        ({"use_rslora": True}, "use_rslora=True is refused"),
        ({"use_dora": True}, "use_dora=True is refused"),
        ({"bias": "all"}, "bias='all' is refused"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] is refused"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern=.* is refused"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices=.* is refused"),
    ],
)
def test_a_config_that_an_engine_would_serve_as_another_adapter_is_refused_by_its_field(
    adapter: Path, layers: AdaptedLayers, fields: dict[str, Any], message: str
) -> None:
    change_config(adapter, **fields)
    with pytest.raises(EngineError, match=message):
        layers.check(adapter)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({_FIRST: None}, "q_proj.lora_A.weight is missing; the adapter is incomplete"),
        ({_FIRST: torch.ones(8, 48)}, r"has shape \[8, 48\], the base with model.adapter.rank=4 needs \[4, 48\]"),
        ({_FIRST: torch.ones(RANK, 64)}, r"has shape \[4, 64\], .* above the base that it was trained on"),
        ({"base_model.model.lm_head.lora_A.weight": torch.ones(RANK, 48)}, "lm_head.lora_A.weight belongs to no layer"),
        (
            {_FIRST.replace("self_attn.q_proj", "mlp.experts.0.up_proj"): torch.ones(RANK, 48)},
            "experts.0.up_proj.lora_A.weight belongs to no layer of model.adapter.target=all_linear",
        ),
    ],
)
def test_tensors_that_the_run_does_not_train_are_refused_by_name(
    adapter: Path, layers: AdaptedLayers, changed: dict[str, torch.Tensor | None], message: str
) -> None:
    change_tensors(adapter, changed)
    with pytest.raises(EngineError, match=message):
        layers.check(adapter)


def test_added_tokens_and_torn_files_are_refused(adapter: Path, layers: AdaptedLayers) -> None:
    (adapter / "added_tokens.json").write_text('{"<new>": 61}')
    with pytest.raises(EngineError, match="an adapter cannot add tokens"):
        layers.check(adapter)
    (adapter / "added_tokens.json").unlink()
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    with pytest.raises(EngineError, match="cannot be read"):
        layers.check(adapter)


def test_a_target_that_the_base_lacks_and_experts_are_refused_at_the_start(base: Path) -> None:
    shapes = read_shapes(base)
    with pytest.raises(ConfigError, match="no linear layer qkv_proj; it has down_proj, gate_proj"):
        adapted_layers(shapes, AdapterConfig(target=("qkv_proj",)))
    shapes["model.layers.1.mlp.experts.0.up_proj.weight"] = (64, 48)
    with pytest.raises(ConfigError, match=r"experts\.0\.up_proj, but experts cannot be adapted"):
        adapted_layers(shapes, AdapterConfig())
    with pytest.raises(ConfigError, match=r"model\.adapter\.rank=512: above the size of .*; choose at most"):
        adapted_layers(read_shapes(base), AdapterConfig(rank=512))
    named = adapted_layers(shapes, AdapterConfig(target=("q_proj", "v_proj")))
    assert named.names == ("q_proj", "v_proj")


def test_an_engine_keeps_the_versions_of_the_staleness_bound_and_two_more() -> None:
    data: dict[str, Any] = {"name": "run", "folder": "run", "model": {"path": "model"}}
    assert AdapterSettings.from_config(validate_run_config(data, "made")) is None
    data["model"]["adapter"], data["schedule"] = {"rank": 4}, {"max_staleness": 3}
    settings = AdapterSettings.from_config(validate_run_config(data, "made"))
    assert settings is not None and settings.kept_versions == 5
