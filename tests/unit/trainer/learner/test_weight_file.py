"""The weight files are what the safetensors library reads, and their digests are those of the bytes on disk."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from rollmesh.checkpoints.describe import describe_folder
from rollmesh.trainer.learner import policy_files
from rollmesh.trainer.learner.policy_files import INDEX_FILE, WEIGHT_FILE, write_weight_file, write_weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_library_reads_what_was_written_and_the_digest_is_that_of_the_file(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_files, "_BLOCK_BYTES", 1000)  # several blocks per tensor
    torch.manual_seed(0)
    shapes = {"matrix": (33, 17), "vector": (5,), "scalar": (), "empty": (0, 4)}
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    path = tmp_path / "model.safetensors"
    digest = write_weight_file(path, tensors)
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == dtype and torch.equal(found[name], tensor), name
    with safe_open(str(path), framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_large_weights_are_written_as_shards_that_the_library_finds_by_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_files, "_SHARD_BYTES", 400)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=16,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    config.save_pretrained(tmp_path)
    digests = write_weights(tmp_path, tensors)
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    assert not (tmp_path / WEIGHT_FILE).exists()
    assert len(digests) > 3 and set(index["weight_map"].values()) == set(digests)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    for name, digest in digests.items():
        assert digest == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
    loaded = dict(Qwen2ForCausalLM.from_pretrained(tmp_path).named_parameters())
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    described = describe_folder(tmp_path)
    assert described.parameter_count == sum(t.numel() for t in tensors.values())


def test_a_model_never_has_more_than_about_32_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_files, "_SHARD_BYTES", 4)
    tensors = {str(number): torch.zeros(10) for number in range(640)}
    assert len(write_weights(tmp_path, tensors)) == 32
