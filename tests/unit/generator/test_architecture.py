"""A config.json means to the torch engine exactly the same as to transformers, or it is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from rollmesh.errors import EngineError
from rollmesh.generator.engines.torch.architecture import architecture_from_config
from rollmesh.generator.engines.torch.kernels import inverse_frequencies, rotation_table

ROTARY: dict[str, type] = {"qwen2": Qwen2RotaryEmbedding, "qwen3": Qwen3RotaryEmbedding, "llama": LlamaRotaryEmbedding}
SIZES = {
    "vocab_size": 100,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 65536,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
DEFAULT = {"rope_type": "default", "rope_theta": 300_000.0}


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": family, **SIZES, **changes}


def transformers_config(config: dict[str, Any], folder: Path) -> PretrainedConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return AutoConfig.from_pretrained(folder)


def check_frequencies(config: dict[str, Any], folder: Path) -> None:
    theirs = ROTARY[config["model_type"]](transformers_config(config, folder))
    arch = architecture_from_config(config)
    assert theirs.attention_scaling == 1.0
    assert torch.equal(inverse_frequencies(arch.rope, arch.head_size), theirs.inv_freq)


@pytest.mark.parametrize("family", ROTARY)
@pytest.mark.parametrize(("theta", "head_dim"), [(10_000, 32), (1_000_000.0, 64), (123_456.789, 96), (5e5, 128)])
@pytest.mark.parametrize("scaling", [{"rope_type": "default"}, LLAMA3, {**LLAMA3, "factor": 32, "high_freq_factor": 8}])
def test_rope_frequencies_are_bit_equal_to_those_of_transformers(tmp_path, family, theta, head_dim, scaling):
    parameters = {**scaling, "rope_theta": theta}
    check_frequencies(config_of(family, head_dim=head_dim, rope_parameters=parameters), tmp_path)


def test_rotary_tables_are_bit_equal_to_those_of_transformers_at_every_position(tmp_path):
    config = config_of("llama", head_dim=64, rope_parameters={**LLAMA3, "rope_theta": 5e5})
    arch = architecture_from_config(config)
    rotary = ROTARY["llama"](transformers_config(config, tmp_path))
    cos, sin = rotary(torch.zeros(1), torch.arange(10_000)[None])
    mine = rotation_table(arch.rope, arch.head_size, 10_000, torch.device("cpu"))[:, 0]
    assert torch.equal(mine.real, cos[0, :, :32])
    assert torch.equal(mine.imag, sin[0, :, :32])


@pytest.mark.parametrize("family", ROTARY)
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": LLAMA3, "rope_parameters": DEFAULT},
        {"rope_scaling": LLAMA3, "rope_parameters": DEFAULT, "rope_theta": 1e6},
        {"rope_scaling": {"type": "default"}, "rope_parameters": {**LLAMA3, "rope_theta": 1e6}},
        {"rope_scaling": {}, "rope_parameters": DEFAULT},
        {"rope_scaling": None, "rope_parameters": DEFAULT},
    ],
)
def test_where_both_rope_scaling_and_rope_parameters_are_present_the_one_that_transformers_takes_counts(
    tmp_path, family, rope
):
    check_frequencies(config_of(family, head_dim=64, **rope), tmp_path)


@pytest.mark.parametrize("family", ROTARY)
def test_an_original_context_beside_the_rope_scaling_counts_as_in_transformers(tmp_path, family):
    beside = {"rope_theta": 1e5, "rope_scaling": LLAMA3, "original_max_position_embeddings": 256}
    check_frequencies(config_of(family, head_dim=64, **beside), tmp_path)


@pytest.mark.parametrize("family", ROTARY)
@pytest.mark.parametrize(
    "absent",
    ["head_dim", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "attention_bias", "rope_theta"],
)
def test_a_key_that_config_json_lacks_means_what_it_means_to_transformers(tmp_path, family, absent):
    present = {"head_dim": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "attention_bias": False}
    config = config_of(family, num_attention_heads=32, **present)
    config.pop(absent, None)
    arch, theirs = architecture_from_config(config), transformers_config(config, tmp_path)
    heads = theirs.num_attention_heads
    assert arch.kv_head_count == theirs.num_key_value_heads
    assert arch.head_size == (getattr(theirs, "head_dim", None) or theirs.hidden_size // heads)
    assert arch.norm_eps == theirs.rms_norm_eps
    assert arch.tied_head == theirs.tie_word_embeddings
    assert arch.rope.theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"partial_rotary_factor": 0.5}, "config.partial_rotary_factor"),
        ({"rope_scaling": {**LLAMA3, "partial_rotary_factor": 0.5}}, "config.rope_scaling.partial_rotary_factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "config.rope_scaling.rope_type='yarn'"),
        ({"rope_parameters": {"full_attention": DEFAULT}}, "config.rope_parameters.full_attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "config.layer_types: 'sliding_attention'"),
    ],
)
def test_a_setting_that_the_engine_does_not_compute_is_refused_by_name(change, named):
    with pytest.raises(EngineError) as caught:
        architecture_from_config(config_of("qwen2", **change))
    assert named in str(caught.value)
