"""Policy folders, read without torch: full weights, and PEFT adapters held to ``model.adapter`` and to their base.

An engine would load most of what is refused here without an error: SGLang ignores ``use_rslora`` and unknown tensors,
and reports weights that do not fit only after it has replaced some of them.
"""

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rollmesh.checkpoints.describe import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, read_adapter_settings
from rollmesh.config import RunConfig
from rollmesh.config.model import AdapterConfig
from rollmesh.errors import CheckpointError, ConfigError, EngineError, UnsupportedModel
from rollmesh.scheduling.resolved_schedule import Schedule

PREFIX = "base_model.model."
"""Prefix of PEFT in front of the base's name of a layer."""
_BLOCK_LAYER = re.compile(r"\.layers\.\d+\..*\.(\w+)$")
_FIXED = "engines fix it when they start: use the run file of the run that trained the adapter"
_LONGEST_HEADER_BYTES = 100_000_000
_ARCHITECTURE_KEYS = (
    *("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings"),
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings"),
    *("rms_norm_eps", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "hidden_act"),
)


def read_config(folder: Path) -> dict[str, Any]:
    """Read ``config.json``; EngineError if the file cannot be read, UnsupportedModel if it is no JSON object."""
    file = folder / "config.json"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise EngineError(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UnsupportedModel(f"{file}: not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise UnsupportedModel(f"{file}: expected an object, got {type(data).__name__}")
    return data


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Read the shape of every tensor in the folder's safetensors files, by name."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UnsupportedModel(f"{folder}: no *.safetensors file")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        shapes.update(read_header(file))
    return shapes


def read_header(file: Path) -> dict[str, tuple[int, ...]]:
    """Read shapes by name from a safetensors header, which must account for every byte of the file."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _LONGEST_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(stream.read(length))
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        if (size := file.stat().st_size) != 8 + length + end:
            raise ValueError(f"{size} bytes, its header describes {8 + length + end}")
        return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise EngineError(f"{file} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSettings:
    """Adapters of one run, as its engines serve them."""

    config: AdapterConfig
    kept_versions: int = 3
    """Newest versions that an engine keeps ready: the staleness bound + 2."""

    @classmethod
    def from_config(cls, config: RunConfig) -> Self | None:
        """Return the settings of a run file; None if the run trains all weights."""
        if config.model.adapter is None:
            return None
        return cls(config=config.model.adapter, kept_versions=Schedule.from_config(config).max_staleness + 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedLayers:
    """Linear layers of the base that the run adapts."""

    config: AdapterConfig
    layers: Mapping[str, tuple[int, ...]]
    """Shape [out, in] of every adapted layer's weight, by the layer's name."""

    @property
    def names(self) -> tuple[str, ...]:
        """Last parts of the layers' names (``q_proj`` ...), sorted."""
        return tuple(sorted({layer.rsplit(".", 1)[-1] for layer in self.layers}))

    @property
    def tensors(self) -> dict[str, tuple[int, int]]:
        rank = self.config.rank
        shapes: dict[str, tuple[int, int]] = {}
        for layer, (rows, columns) in self.layers.items():
            shapes[f"{PREFIX}{layer}.lora_A.weight"] = rank, columns
            shapes[f"{PREFIX}{layer}.lora_B.weight"] = rows, rank
        return shapes

    @property
    def _target(self) -> str:
        names = ", ".join(self.names)
        return f"all_linear ({names})" if self.config.target == "all_linear" else f"[{names}]"

    def check(self, folder: Path) -> None:
        """Raise EngineError unless ``folder`` has an adapter of this rank, alpha and these layers, and nothing else."""
        try:
            settings = read_adapter_settings(folder)
        except CheckpointError as error:
            raise EngineError(str(error)) from error
        file = folder / ADAPTER_CONFIG_FILE
        for field, name in (("r", "rank"), ("lora_alpha", "alpha")):
            theirs, ours = getattr(settings, name), getattr(self.config, name)
            if theirs != ours:
                raise EngineError(f"{file}: {field}={theirs!r}, model.adapter.{name} is {ours}; {_FIXED}")
        if set(settings.target) != set(self.names):
            target = list(settings.target)
            raise EngineError(f"{file}: target_modules={target}, model.adapter.target={self._target}; {_FIXED}")
        if (folder / "added_tokens.json").exists():
            raise EngineError(f"{folder}/added_tokens.json: an adapter cannot add tokens; train without new tokens")
        file, wanted = folder / ADAPTER_WEIGHTS_FILE, self.tensors
        found = read_header(file)
        for name, shape in wanted.items():
            if name not in found:
                raise EngineError(f"{file}: {name} is missing; the adapter is incomplete, publish it again")
            if found[name] != shape:
                raise EngineError(
                    f"{file}: {name} has shape {list(found[name])}, the base with model.adapter.rank="
                    f"{self.config.rank} needs {list(shape)}; serve the adapter above the base that it was trained on"
                )
        if surplus := sorted(set(found) - set(wanted)):
            raise EngineError(
                f"{file}: {surplus[0]} belongs to no layer of model.adapter.target={self._target}; "
                "only linear layers of the transformer blocks can be adapted"
            )


def adapted_layers(base: Mapping[str, tuple[int, ...]], config: AdapterConfig) -> AdaptedLayers:
    """Select the layers of ``model.adapter.target`` among the base's tensors (shapes by name).

    Raises ConfigError for a name that no linear layer has, for experts, and for a rank above the size of a layer.
    """
    linear: dict[str, tuple[int, ...]] = {}
    for name, shape in base.items():
        layer = name.removesuffix(".weight")
        if layer != name and len(shape) == 2 and _BLOCK_LAYER.search(layer):
            linear[layer] = shape
    known = {layer.rsplit(".", 1)[-1] for layer in linear}
    if config.target == "all_linear":
        chosen = known
    else:
        chosen = set(config.target)
        if missing := sorted(chosen - known):
            raise ConfigError(
                f"model.adapter.target: the base has no linear layer {missing[0]}; it has {', '.join(sorted(known))}"
            )
    layers = {layer: shape for layer, shape in linear.items() if layer.rsplit(".", 1)[-1] in chosen}
    smallest = min(layers, key=lambda layer: min(layers[layer]), default=None)
    if smallest is not None and config.rank > min(layers[smallest]):
        raise ConfigError(
            f"model.adapter.rank={config.rank}: above the size of {smallest} ({min(layers[smallest])}); choose at most "
            "that, or leave the layer out of model.adapter.target"
        )
    if expert := next((layer for layer in layers if ".experts." in layer), None):
        raise ConfigError(
            f"model.adapter.target={config.target}: selects {expert}, but experts cannot be adapted; name the layers "
            "of the attention, for example [q_proj, k_proj, v_proj, o_proj]"
        )
    return AdaptedLayers(config=config, layers=layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFolder:
    """One verified Hugging Face folder."""

    vocab_size: int
    max_positions: int
    architecture: Mapping[str, Any]
    """Fields of config.json that determine the shape of the computation."""
    tensors: Mapping[str, tuple[int, ...]]
    """Shape of every stored tensor, by name."""


def read_folder(path: Path) -> PolicyFolder:
    """Read config.json and the headers of the weight files; EngineError names the invalid file or field."""
    config = read_config(path)
    scaling, parameters = config.get("rope_scaling"), config.get("rope_parameters")
    if scaling and parameters and scaling != parameters:  # libraries disagree on their precedence
        raise UnsupportedModel(
            f"{path / 'config.json'}: rope_scaling={scaling} and rope_parameters={parameters}: keep one of them; the "
            "trainer uses rope_scaling"
        )
    try:
        vocab_size, max_positions = int(config["vocab_size"]), int(config["max_position_embeddings"])
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedModel(
            f"{path / 'config.json'}: vocab_size and max_position_embeddings must be integers"
        ) from error
    return PolicyFolder(
        vocab_size=vocab_size,
        max_positions=max_positions,
        architecture={key: config[key] for key in _ARCHITECTURE_KEYS if key in config},
        tensors=read_shapes(path),
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
