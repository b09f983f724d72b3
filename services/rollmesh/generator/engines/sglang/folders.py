"""Contents of a policy folder, read without torch, to check that a running server can load it.

SGLang reports weights that do not fit only after it has replaced some of them, so they are checked here before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmesh.errors import UnsupportedModel
from rollmesh.generator.engines.stored_tensors import read_object, read_shapes

_ARCHITECTURE_KEYS = (
    "architectures",
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "tie_word_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "rms_norm_eps",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "hidden_act",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFolder:
    """One verified Hugging Face folder."""

    path: Path
    vocab_size: int
    max_positions: int
    architecture: Mapping[str, Any]
    """Fields of config.json that determine the shape of the computation."""
    tensors: Mapping[str, tuple[int, ...]]
    """Shape of every stored tensor, by name."""


def read_folder(path: Path) -> PolicyFolder:
    """Read config.json and the headers of the weight files; EngineError names the invalid file or field."""
    config = read_object(path / "config.json")
    _refuse_ambiguous(config, path)
    tensors = read_shapes(path)
    try:
        vocab_size, max_positions = int(config["vocab_size"]), int(config["max_position_embeddings"])
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedModel(
            f"{path / 'config.json'}: vocab_size and max_position_embeddings must be integers"
        ) from error
    return PolicyFolder(
        path=path,
        vocab_size=vocab_size,
        max_positions=max_positions,
        architecture={key: config[key] for key in _ARCHITECTURE_KEYS if key in config},
        tensors=tensors,
    )


def _refuse_ambiguous(config: Mapping[str, Any], path: Path) -> None:
    """Raise UnsupportedModel if the two rotary embedding keys differ: libraries disagree on their precedence."""
    scaling, parameters = config.get("rope_scaling"), config.get("rope_parameters")
    if scaling and parameters and scaling != parameters:
        raise UnsupportedModel(
            f"{path / 'config.json'}: rope_scaling={scaling} and rope_parameters={parameters}: keep one of them; the "
            "trainer uses rope_scaling"
        )


def difference(running: PolicyFolder, other: PolicyFolder) -> str:
    """Describe the first difference of ``other`` from the running architecture; empty if it fits."""
    for key in _ARCHITECTURE_KEYS:
        mine, theirs = running.architecture.get(key), other.architecture.get(key)
        if mine != theirs:
            return f"{key} is {theirs}, the running policy has {mine}"
    for name, shape in running.tensors.items():
        if name not in other.tensors:
            return f"no tensor {name}"
        if other.tensors[name] != shape:
            return f"{name} has shape {list(other.tensors[name])}, the running policy has {list(shape)}"
    surplus = sorted(set(other.tensors) - set(running.tensors))
    return f"tensor {surplus[0]}, which the running policy does not have" if surplus else ""
