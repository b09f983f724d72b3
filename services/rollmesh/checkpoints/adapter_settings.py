"""Settings of an adapter folder (PEFT), and refusal of those that the trainer and the engines do not apply."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rollmesh.checkpoints.describe import ADAPTER_CONFIG_FILE, read_json
from rollmesh.checkpoints.reasons import Reason
from rollmesh.config.model import AdapterConfig
from rollmesh.errors import CheckpointError

_REFUSED: Mapping[str, str] = {
    "use_rslora": "rsLoRA scales by alpha / sqrt(rank), which engines ignore",
    "use_dora": "DoRA also trains the magnitude of the weights",
    "lora_bias": "a bias is no low-rank adapter",
    "modules_to_save": "whole modules are no low-rank adapter",
    "trainable_token_indices": "added or retrained tokens are no low-rank adapter",
    "target_parameters": "experts of a mixture are not adapted",
    "rank_pattern": "all layers have one rank",
    "alpha_pattern": "all layers have one alpha",
    "layers_to_transform": "all layers are adapted",
    "layer_replication": "layers are not replicated",
    "exclude_modules": "the adapted layers are named by target_modules",
    "fan_in_fan_out": "transposed layers are not adapted",
}
"""Fields of PEFT that must be unset, with the reason."""
_UNADAPTABLE = ("lm_head", "embed_tokens", "wte")
REMEDY = "merge it into its base with peft's merge_and_unload, and start from the merged folder"


def read_adapter_settings(folder: Path) -> AdapterConfig:
    """Read the settings of an adapter folder. Raises CheckpointError that names a field that cannot be applied."""
    file = folder / ADAPTER_CONFIG_FILE
    found = read_json(file)
    _require(file, found, "peft_type", found.get("peft_type") == "LORA", "only low-rank adapters are applied")
    for field, reason in _REFUSED.items():
        _require(file, found, field, not found.get(field), reason)
    _require(file, found, "bias", found.get("bias", "none") == "none", "a bias is no low-rank adapter")
    targets = found.get("target_modules")
    named = isinstance(targets, list) and bool(targets) and all(isinstance(name, str) for name in targets)
    _require(file, found, "target_modules", named, "the adapted layers must be a list of names")
    whole = [name for name in targets or () if name in _UNADAPTABLE]
    _require(file, found, "target_modules", not whole, "embeddings and lm_head are not adapted")
    try:
        # In order: the engines compare the settings of two folders.
        return AdapterConfig(
            rank=found.get("r", 0), alpha=found.get("lora_alpha", 0), target=tuple(sorted(targets or ()))
        )
    except ValidationError as error:
        first = error.errors()[0]
        name = {"rank": "r", "alpha": "lora_alpha", "target": "target_modules"}.get(str(first["loc"][0]), "")
        raise CheckpointError(f"{file}: {name}: {first['msg']}", reason=Reason.FOREIGN_ARCHITECTURE) from error


def _require(file: Path, found: Mapping[str, Any], field: str, accepted: bool, reason: str) -> None:
    if not accepted:
        raise CheckpointError(
            f"{file}: {field}={found.get(field)!r} is refused: {reason}; {REMEDY}", reason=Reason.FOREIGN_ARCHITECTURE
        )
