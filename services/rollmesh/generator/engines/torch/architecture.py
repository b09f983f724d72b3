"""Model architecture from a Hugging Face ``config.json``; unsupported keys are rejected by name."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rollmesh.errors import UnsupportedModel
from rollmesh.generator.engines.policy_folders import read_config

_FAMILIES = ("qwen2", "qwen3", "llama")
_ORIGINAL_CONTEXT = "original_max_position_embeddings"
_ABSENT_KV_HEADS: Mapping[str, int | None] = {"qwen2": 32, "qwen3": 32, "llama": None}
_ABSENT_HEAD_SIZE: Mapping[str, int | None] = {"qwen2": None, "qwen3": 128, "llama": None}
"""Defaults of transformers for a key missing from config.json; None derives them from the other sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding; the last four fields are for ``llama3`` only."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Shape of a decoder-only transformer; policies with equal architectures can replace each other."""

    family: str
    vocab_size: int
    hidden_size: int
    layer_count: int
    head_count: int
    kv_head_count: int
    head_size: int
    mlp_size: int
    norm_eps: float
    rope: Rope
    max_positions: int
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    tied_head: bool

    @property
    def heads_per_kv(self) -> int:
        """Query heads that share one key-value head."""
        return self.head_count // self.kv_head_count


def read_architecture(folder: Path) -> Architecture:
    """Read ``config.json``; UnsupportedModel names a missing or unsupported key."""
    return architecture_from_config(read_config(folder))


def architecture_from_config(config: Mapping[str, Any]) -> Architecture:
    """Translate a Hugging Face config (format of transformers 4 or 5)."""
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise UnsupportedModel(f"config.model_type={family!r}: the torch engine serves {', '.join(_FAMILIES)}")
    for key in ("use_sliding_window", "mlp_bias", "quantization_config"):
        if config.get(key):
            raise UnsupportedModel(f"config.{key}={config[key]!r} is not supported")
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise UnsupportedModel(f"config.hidden_act={activation!r}: only silu is supported")
    if other := [kind for kind in config.get("layer_types") or () if kind != "full_attention"]:
        raise UnsupportedModel(f"config.layer_types: {other[0]!r} is not supported, only full_attention is")
    heads = _integer(config, "num_attention_heads")
    kv_heads = config.get("num_key_value_heads", _ABSENT_KV_HEADS[family]) or heads
    if heads % kv_heads:
        raise UnsupportedModel(f"config.num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}")
    hidden = _integer(config, "hidden_size")
    head_size = config.get("head_dim", _ABSENT_HEAD_SIZE[family]) or hidden // heads
    if head_size % 2:
        raise UnsupportedModel(f"config.head_dim={head_size}: rotary embedding needs an even number")
    attention_bias = bool(config.get("attention_bias", False))
    return Architecture(
        family=family,
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=hidden,
        layer_count=_integer(config, "num_hidden_layers"),
        head_count=heads,
        kv_head_count=kv_heads,
        head_size=head_size,
        mlp_size=_integer(config, "intermediate_size"),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config),
        max_positions=_integer(config, "max_position_embeddings"),
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=family != "qwen2" and attention_bias,
        qk_norm=family == "qwen3",
        tied_head=bool(config.get("tie_word_embeddings", False)),
    )


def difference(running: Architecture, other: Architecture) -> str:
    """Describe the first field in which two architectures differ, with both values; empty if they are equal."""
    for f in fields(Architecture):
        here, there = getattr(running, f.name), getattr(other, f.name)
        if here != there:
            return f"{f.name} is {there}, the running policy has {here}"
    return ""


def _rope(config: Mapping[str, Any]) -> Rope:
    """Read the rotary embedding as transformers does: ``rope_scaling`` takes precedence over ``rope_parameters``."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    scaling = config.get(key) or {}
    nested = [name for name, value in scaling.items() if isinstance(value, Mapping)]
    if nested:
        raise UnsupportedModel(f"config.{key}.{nested[0]}: rotary embeddings per layer type are not supported")
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    for origin, values in ((f"config.{key}", scaling), ("config", config)):
        if float(values.get("partial_rotary_factor") or 1.0) != 1.0:
            raise UnsupportedModel(f"{origin}.partial_rotary_factor: only 1.0 is supported")
    if kind == "default":
        return Rope(theta=theta)
    if kind != "llama3":
        raise UnsupportedModel(f"config.{key}.rope_type={kind!r}: only default and llama3 are supported")
    try:
        return Rope(
            theta=theta,
            kind=kind,
            factor=float(scaling["factor"]),
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
            original_context=int(config.get(_ORIGINAL_CONTEXT) or scaling[_ORIGINAL_CONTEXT]),
        )
    except KeyError as error:
        raise UnsupportedModel(f"config.{key}.{error.args[0]} is missing") from error


def _integer(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModel(f"config.{key}={value!r}: expected a positive integer")
    return value
