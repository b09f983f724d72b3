"""The weight file is what the safetensors library reads, and its digest is that of the bytes on disk."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from rollmesh.trainer.learner import weight_file
from rollmesh.trainer.learner.weight_file import write_weight_file


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_library_reads_what_was_written_and_the_digest_is_that_of_the_file(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_file, "_BLOCK_BYTES", 1000)  # several blocks per tensor
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
