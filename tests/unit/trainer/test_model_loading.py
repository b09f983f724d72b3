"""What is loaded for training, what is refused by name, and what is written for the generators."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig, Qwen3MoeConfig

from rollmesh.config.trainer import TrainerConfig
from rollmesh.errors import CheckpointError, ConfigError
from rollmesh.trainer.model import load_policy_model
from rollmesh.trainer.step import PolicyTrainer

from .conftest import ModelMaker
from .made_batches import SHAPE, random_batch
from .reference import largest_difference, weights_of

CPU = torch.device("cpu")


def test_a_model_that_carries_state_across_sequences_is_refused(make_model: ModelMaker) -> None:
    folder = make_model(config=MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(ConfigError, match="MambaForCausalLM cannot be packed"):
        load_policy_model(folder, dtype=torch.float32, device=CPU)


def test_a_mixture_of_experts_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    Qwen3MoeConfig(**SHAPE, num_experts=4).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="routes tokens to 4 experts"):
        load_policy_model(tmp_path, dtype=torch.float32, device=CPU)


def test_a_folder_without_a_model_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=tmp_path.name):
        load_policy_model(tmp_path, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "with an unknown .*k_proj.bias"),
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, "without model.layers.2.*"),
        ({"intermediate_size": 24}, "with another shape of model.layers.0.mlp"),
        ({"num_hidden_layers": "two"}, "not a loadable causal LM"),
    ],
)
def test_weights_of_another_architecture_are_never_filled_with_noise_or_left_out(
    make_model: ModelMaker, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    folder = shutil.copytree(make_model("qwen2"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError, match=message):
        load_policy_model(folder, dtype=torch.float32, device=CPU)


def test_a_torn_weight_file_is_refused(make_model: ModelMaker, tmp_path: Path) -> None:
    folder = shutil.copytree(make_model("qwen2"), tmp_path / "model")
    (weights,) = folder.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=f"{folder}: not a loadable causal LM"):
        load_policy_model(folder, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_an_exported_folder_loads_like_the_original(make_model: ModelMaker, tmp_path: Path, name: str) -> None:
    source = make_model(name)
    PolicyTrainer.from_folder(source, TrainerConfig()).export(tmp_path)
    assert largest_difference(weights_of(tmp_path), weights_of(source)) == 0
    assert (tmp_path / "tokenizer.json").read_text() == "{}"
    written, original = (json.loads((f / "config.json").read_text()) for f in (tmp_path, source))
    assert written == {**original, "dtype": "float32"}
    kept = {p.name for p in source.iterdir()}
    assert {p.name for p in tmp_path.iterdir()} == kept


def test_weights_are_published_in_the_requested_dtype(make_model: ModelMaker, tmp_path: Path) -> None:
    trainer = PolicyTrainer.from_folder(make_model("qwen2"), TrainerConfig(learning_rate=1e-2), dtype="bfloat16")
    trainer.train(random_batch(0), {0: 0})
    trainer.export(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 for n, p in trainer.state_tensors().items() if n.startswith("model."))
