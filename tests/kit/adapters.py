"""PEFT folders made of random numbers, and full folders that compute the same, as a reference."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

RANK, ALPHA = 4, 8
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PREFIX = "base_model.model."


def write_adapter(
    folder: Path,
    base: Path,
    seed: int,
    *,
    targets: Iterable[str] = ALL_LINEAR,
    size: float = 0.2,
    rank: int = RANK,
    **config: Any,
) -> Path:
    """A random adapter above ``base``; keyword arguments are further fields of adapter_config.json."""
    generator, tensors, targets = torch.Generator().manual_seed(seed), {}, sorted(targets)
    for name, weight in load_file(base / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if ".layers." in layer and layer.rsplit(".", 1)[-1] in targets:
            rows, columns = weight.shape
            tensors[f"{_PREFIX}{layer}.lora_A.weight"] = size * torch.randn(rank, columns, generator=generator)
            tensors[f"{_PREFIX}{layer}.lora_B.weight"] = size * torch.randn(rows, rank, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**fields, **config}))
    return folder


def change_config(folder: Path, **fields: Any) -> None:
    """Replace fields of an adapter's config."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def change_tensors(folder: Path, changed: dict[str, torch.Tensor | None]) -> None:
    """Replace tensors of an adapter, or delete them (None)."""
    file = folder / "adapter_model.safetensors"
    tensors: dict[str, Any] = {**load_file(file), **changed}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


def merge(folder: Path, base: Path, adapter: Path) -> Path:
    """A full folder with the base's weights plus ``alpha / rank * B A``."""
    shutil.copytree(base, folder, dirs_exist_ok=True)
    config = json.loads((adapter / "adapter_config.json").read_text())
    weights, factors = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, a in factors.items():
        if ".lora_A." in name:
            layer = name.removeprefix(_PREFIX).removesuffix(".lora_A.weight")
            weights[f"{layer}.weight"] += config["lora_alpha"] / config["r"] * factors[name.replace("_A.", "_B.")] @ a
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
