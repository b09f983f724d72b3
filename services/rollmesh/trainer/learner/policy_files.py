"""Copies of the policy in training, and the folders that are written from them while the next step trains."""

import copy
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from rollmesh.checkpoints.describe import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE
from rollmesh.checkpoints.durable import sync_file
from rollmesh.checkpoints.manifest import MANIFEST_FILE
from rollmesh.checkpoints.policies import ANNOUNCED_FILE
from rollmesh.trainer.learner.distributed import World, gathered
from rollmesh.trainer.learner.forward_backward import Compute, score_sequences
from rollmesh.trainer.learner.policy_model import PolicyModel
from rollmesh.types import Float32Array, Int32Array

WriteWeights = Callable[[Path], Mapping[str, str]]
"""Function that writes copied weights to a folder, in any thread, and returns their digest, by path."""
ScoreSequences = Callable[[Sequence[Int32Array]], list[Float32Array]]
"""Function that scores sequences as ``PolicyTrainer.logprobs`` does, in any thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCopy:
    """Weights of one version in host memory, until the next version is copied."""

    weights: Mapping[str, Tensor]
    """Copied weights, by their published names; empty except on rank 0."""
    write: WriteWeights
    """Writes full weights as a Hugging Face folder, an adapter as a PEFT folder."""
    score: ScoreSequences | None
    """Scores with the copy. None if only the model in training scores: on a GPU, with several ranks, for weights in
    another dtype than the published one, and for the base of an adapter, which is published once."""


class PolicyOutput:
    """Copies of the weights in the publishing dtype, in host memory that every version reuses."""

    def __init__(self, model: PolicyModel, source: Path, dtype: torch.dtype, compute: Compute) -> None:
        self._model = model
        self._source = source
        self._dtype = dtype
        self._compute = compute
        self._weights = WeightCopy(dtype)
        self._scorer: PolicyModel | None = None
        """Second model whose trained parameters are the copied weights."""

    def copy_out(self, *, base: bool = False) -> PolicyCopy:
        """Copy the trained weights, or the base without its adapter, over the last copy. Every rank must call it."""
        world = self._compute.world
        if base and self._model.adapter is not None:
            # Published once: its memory is not kept.
            weights = WeightCopy(self._dtype).take(self._model.base_parameters(), world)
            return PolicyCopy(weights=weights, write=partial(self._write_full, weights), score=None)
        trained = self._model.trained_parameters()
        weights = self._weights.take(trained, world)
        write = self._write_full if self._model.adapter is None else self._write_adapter
        score: ScoreSequences | None = None
        same_dtype = all(parameter.dtype == self._dtype for parameter in trained.values())
        if world.size == 1 and self._compute.device.type == "cpu" and same_dtype:
            if self._scorer is None:
                # It has the copy in place of the trained parameters, and shares frozen ones, which never change.
                shared = {id(parameter): parameter for parameter in self._model.parameters()}
                shared |= {id(trained[name]): nn.Parameter(w, requires_grad=False) for name, w in weights.items()}
                # deepcopy takes the values of its memo for the objects with these ids.
                self._scorer = copy.deepcopy(self._model, memo=dict(shared))
            score = partial(score_sequences, self._scorer, self._compute, temperature=1.0)
        return PolicyCopy(weights=weights, write=partial(write, weights), score=score)

    def _write_full(self, weights: Mapping[str, Tensor], folder: Path) -> Mapping[str, str]:
        return write_policy_folder(folder, weights, self._dtype, self._source, self._model.config)

    def _write_adapter(self, weights: Mapping[str, Tensor], folder: Path) -> Mapping[str, str]:
        folder.mkdir(parents=True, exist_ok=True)
        config = json.dumps(self._model.adapter_file, indent=2, sort_keys=True)
        (folder / ADAPTER_CONFIG_FILE).write_text(f"{config}\n", encoding="utf-8")
        return {ADAPTER_WEIGHTS_FILE: write_weight_file(folder / ADAPTER_WEIGHTS_FILE, weights)}


class WeightCopy:
    """Weights by their published names, in memory that every version reuses: fresh pages cost more than the copy."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._weights: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, weights: Mapping[str, Tensor], world: World) -> Mapping[str, Tensor]:
        """Copy the weights over the last copy; empty except on rank 0, but every rank must call it."""
        for name, weight in weights.items():
            value = gathered(weight)
            if not world.leads:
                continue
            if name not in self._weights:
                self._weights[name] = torch.empty(value.shape, dtype=self._dtype, pin_memory=value.is_cuda)
            self._weights[name].copy_(value)
        return self._weights


WEIGHT_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
_BLOCK_BYTES = 1 << 20
"""Bytes per write. For larger ones the kernel searches larger pieces of free memory: up to seconds per GiB."""
_SHARD_BYTES = 256 << 20
"""Smallest limit of a shard; models up to this size are one file."""
_MOST_SHARDS = 32
_THREADS = 4
"""Shards that are written at once."""


def write_weights(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Write contiguous CPU tensors to one file, or to shards with an index; return the sha256 (hex) of each by path."""
    shards = list(_shards(tensors))
    if len(shards) == 1:
        return {WEIGHT_FILE: write_weight_file(folder / WEIGHT_FILE, tensors)}
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]

    def write_shard(name: str, tensors: Mapping[str, Tensor]) -> str:
        digest = write_weight_file(folder / name, tensors)
        sync_file(folder / name)  # while other shards are written
        return digest

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="weights") as pool:
        digests = list(pool.map(write_shard, names, shards))
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard},
    }
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return dict(zip(names, digests, strict=True))


def _shards(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Divide the tensors in their order; only a tensor that alone is larger than the limit makes a larger shard."""
    limit = max(_SHARD_BYTES, sum(tensor.nbytes for tensor in tensors.values()) // _MOST_SHARDS)
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


def write_weight_file(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write contiguous CPU tensors to a safetensors file; return its sha256 (hex)."""
    digest = hashlib.sha256()
    with path.open("wb") as file, ThreadPoolExecutor(1, thread_name_prefix="digest") as pool:
        for block in _blocks(tensors):
            hashed = pool.submit(digest.update, block)
            file.write(block)
            hashed.result()
    return digest.hexdigest()


def _blocks(tensors: Mapping[str, Tensor]) -> Iterator[memoryview | bytes]:
    """Yield header length (8 bytes, little-endian), header (JSON, padded to 8 bytes) and tensors, without a copy."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.nbytes
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    yield len(header).to_bytes(8, "little") + header
    for tensor in tensors.values():
        data = tensor.view(-1).view(torch.uint8).numpy().data
        for start in range(0, len(data), _BLOCK_BYTES):
            yield data[start : start + _BLOCK_BYTES]


_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf")
_REPLACED_FILES = (*_WEIGHT_FILES, "config.json", MANIFEST_FILE, ANNOUNCED_FILE)


def write_policy_folder(
    folder: Path, weights: Mapping[str, Tensor], dtype: torch.dtype, source: Path, model: PretrainedConfig
) -> Mapping[str, str]:
    """Write a folder for ``from_pretrained``: weights in ``dtype``, all other files from ``source``.

    ``weights`` are full CPU tensors by their Hugging Face names; tied weights occur once. ``model`` is the config of
    the loaded model, which decides whether they are tied. Returns the digest of the weights, by path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and not any(path.match(pattern) for pattern in _REPLACED_FILES):
            shutil.copyfile(path, folder / path.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    config["tie_word_embeddings"] = model.tie_word_embeddings
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in weights.items()}
    return write_weights(folder, tensors)
