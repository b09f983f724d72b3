"""A PEFT adapter folder, read without torch and held to the run's ``model.adapter`` and to the base's layers.

An engine would load most of what is refused here without an error: SGLang ignores ``use_rslora`` and unknown tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rollmesh.checkpoints.adapter_settings import read_adapter_settings
from rollmesh.checkpoints.describe import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE
from rollmesh.config import RunConfig
from rollmesh.config.adapter import AdapterConfig
from rollmesh.errors import CheckpointError, ConfigError, EngineError
from rollmesh.generator.engines.stored_tensors import read_header
from rollmesh.scheduling.resolved_schedule import Schedule

PREFIX = "base_model.model."
"""Prefix of PEFT in front of the base's name of a layer."""
_BLOCK_LAYER = re.compile(r"\.layers\.\d+\..*\.(\w+)$")


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
        """Shape of every tensor that an adapter has, by name."""
        rank = self.config.rank
        shapes: dict[str, tuple[int, int]] = {}
        for layer, (rows, columns) in self.layers.items():
            shapes[f"{PREFIX}{layer}.lora_A.weight"] = rank, columns
            shapes[f"{PREFIX}{layer}.lora_B.weight"] = rows, rank
        return shapes

    def check(self, folder: Path) -> None:
        """Raise EngineError unless ``folder`` has an adapter of this rank, alpha and these layers, and nothing else."""
        _check_config(folder, self)
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
                f"{file}: {surplus[0]} belongs to no layer of model.adapter.target={_shown(self)}; "
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


def _check_config(folder: Path, layers: AdaptedLayers) -> None:
    """Raise EngineError for the first setting of an adapter folder that differs from the run file."""
    try:
        found = read_adapter_settings(folder)
    except CheckpointError as error:
        raise EngineError(str(error)) from error
    file = folder / ADAPTER_CONFIG_FILE
    for field, name in (("r", "rank"), ("lora_alpha", "alpha")):
        theirs, ours = getattr(found, name), getattr(layers.config, name)
        if theirs != ours:
            raise EngineError(
                f"{file}: {field}={theirs!r}, model.adapter.{name} is {ours}; engines fix it when they start: use the "
                "run file of the run that trained the adapter"
            )
    if set(found.target) != set(layers.names):
        raise EngineError(
            f"{file}: target_modules={list(found.target)}, model.adapter.target={_shown(layers)}; engines fix it when "
            "they start: use the run file of the run that trained the adapter"
        )


def _shown(layers: AdaptedLayers) -> str:
    target, names = layers.config.target, ", ".join(layers.names)
    return f"all_linear ({names})" if target == "all_linear" else f"[{names}]"
