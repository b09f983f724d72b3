"""Description of a Hugging Face or PEFT folder, read without torch or transformers."""

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rollmesh.checkpoints.manifest import Manifest, ModelShape
from rollmesh.checkpoints.sealing import canonical
from rollmesh.config.model import AdapterConfig
from rollmesh.errors import CheckpointError, Reason

ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
_MAX_HEADER_BYTES = 100 << 20
_OF_BASE = ("architecture", "tokenizer_sha256", "chat_template_sha256")
_POINTER = b"version https://git-lfs"


def describe_folder(folder: Path, base: Manifest | None = None) -> dict[str, Any]:
    """Return the fields of a manifest that describe a Hugging Face folder, or a PEFT folder above a ``base``.

    An adapter has weights of its own, and the architecture and the tokenizer of its base. Raises CheckpointError with
    the name of a missing or malformed file.
    """
    config = read_json(folder / ("config.json" if base is None else ADAPTER_CONFIG_FILE))
    dtype, parameter_count = _weights(folder)
    fields: dict[str, Any] = {"dtype": dtype, "parameter_count": parameter_count}
    if base is not None:
        return fields | {name: getattr(base, name) for name in _OF_BASE}
    architecture, template = architecture_of(config, str(folder)), hashlib.sha256(_chat_template(folder).encode())
    return fields | dict(zip(_OF_BASE, (architecture, _tokenizer_digest(folder), template.hexdigest()), strict=True))


def architecture_of(config: Mapping[str, Any], origin: str) -> ModelShape:
    """Summarize a model config. Raises CheckpointError with the name of a missing or refused field."""
    reject_quantised(config, origin)
    try:
        heads = int(config["num_attention_heads"])
        return ModelShape(
            model_type=str(config["model_type"]),
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            layer_count=int(config["num_hidden_layers"]),
            head_count=heads,
            kv_head_count=int(config.get("num_key_value_heads") or heads),
            intermediate_size=int(config.get("intermediate_size") or 0),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        family = config.get("model_type")
        raise CheckpointError(
            f"{origin}: config.json has no field {error.args[0]!r}; models of the family {family!r} cannot be trained "
            "unless they name their sizes as Llama does"
        ) from error
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{origin}: config.json: {error}") from error


def reject_quantised(config: Mapping[str, Any], origin: str) -> None:
    """Raise CheckpointError for quantised weights: transformers trains other weights than the config describes."""
    if settings := config.get("quantization_config"):
        method = settings.get("quant_method", "unknown") if isinstance(settings, Mapping) else settings
        raise CheckpointError(
            f"{origin}: config.json: quantization_config has quant_method={method}: quantised weights cannot be "
            "trained; use the folder of the original weights"
        )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises CheckpointError if it is missing or not a JSON object."""
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing", reason=Reason.MISSING) from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return data


def _weights(folder: Path) -> tuple[str, int]:
    """Return the most common dtype by elements, and the number of elements, over all safetensors headers."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder}: no safetensors file", reason=Reason.MISSING)
    elements: Counter[str] = Counter()
    for file in files:
        for name, tensor in _safetensors_header(file).items():
            if name != "__metadata__":
                elements[tensor["dtype"]] += prod(tensor["shape"])
    if not elements.total():
        raise CheckpointError(f"{folder}: the safetensors files contain no weights")
    return elements.most_common(1)[0][0], elements.total()


def check_weights(folder: Path) -> None:
    """Check that the weights are complete, from their headers and sizes, and that the embedding matches the config.

    Raises CheckpointError with the file and the remedy.
    """
    vocab_size = read_json(folder / "config.json").get("vocab_size")
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as content:
            if content.read(len(_POINTER)) == _POINTER:
                raise CheckpointError(f"{file}: a git-lfs pointer, not weights; run git lfs pull in {folder}")
        header = _safetensors_header(file)
        tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
        end = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
        with file.open("rb") as content:
            expected = 8 + struct.unpack("<Q", content.read(8))[0] + end
        if file.stat().st_size < expected:
            raise CheckpointError(
                f"{file}: {file.stat().st_size} of {expected} bytes; copy or download it again",
                reason=Reason.TRUNCATED,
            )
        embedding = tensors.get("model.embed_tokens.weight")
        if embedding is not None and isinstance(vocab_size, int) and embedding["shape"][0] != vocab_size:
            raise CheckpointError(
                f"{file}: the embedding has {embedding['shape'][0]} rows, but vocab_size={vocab_size} in config.json; "
                "use weights and config of the same model"
            )


def _safetensors_header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER_BYTES + 1
        header = file.read(length) if length <= _MAX_HEADER_BYTES else b""
    try:
        data = json.loads(header)
    except ValueError as error:
        raise CheckpointError(f"{path}: not a safetensors file", reason=Reason.TRUNCATED) from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: not a safetensors file")
    return data


def _tokenizer_digest(folder: Path) -> str:
    """Return the digest over names and contents. The chat template has a separate digest."""
    digest = hashlib.sha256()
    for name in _TOKENIZER_FILES:
        path = folder / name
        if path.is_file():
            digest.update(f"{name}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    config = folder / "tokenizer_config.json"
    if config.is_file():
        data = {k: v for k, v in read_json(config).items() if k != "chat_template"}
        digest.update(b"tokenizer_config.json\0" + canonical(data))
    return digest.hexdigest()


def _chat_template(folder: Path) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    config = folder / "tokenizer_config.json"
    template = read_json(config).get("chat_template") if config.is_file() else None
    return template if isinstance(template, str) else json.dumps(template, sort_keys=True) if template else ""


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
