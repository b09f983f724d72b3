"""The config of a published folder describes the model in memory, so that engines compute the trained policy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, Gemma2Config, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from rollmesh.checkpoints.describe import describe_folder
from rollmesh.config.model import AdapterConfig
from rollmesh.config.trainer import TrainerConfig
from rollmesh.errors import CheckpointError
from rollmesh.generator.engines.torch.architecture import read_architecture
from rollmesh.generator.engines.torch.weights import load_weights
from rollmesh.trainer.learner.policy_model import load_policy_model
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer

from ....kit.made_batches import SHAPE
from .conftest import ModelMaker

CPU = torch.device("cpu")
FAMILIES: dict[str, type[PretrainedConfig]] = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}


def changed_config(folder: Path, **fields: Any) -> None:
    """Change fields of a config.json; None removes one."""
    config = {**json.loads((folder / "config.json").read_text()), **fields}
    kept = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


def model_with_own_head(make_model: ModelMaker, folder: Path, family: str) -> Path:
    """A model with a head of its own, whose config says that the head is the embedding."""
    config = FAMILIES[family](**SHAPE, head_dim=8, tie_word_embeddings=False)
    shutil.copytree(make_model(config=config), folder)
    changed_config(folder, tie_word_embeddings=True)
    return folder


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_of_its_own_reaches_generation_although_the_config_says_that_it_is_tied(
    make_model: ModelMaker, tmp_path: Path, family: str, adapted: bool
) -> None:
    source = model_with_own_head(make_model, tmp_path / "source", family)
    adapter = AdapterConfig(rank=2) if adapted else None
    trainer = PolicyTrainer.from_folder(source, TrainerConfig(), adapter=adapter)
    trainer.copy_out(base=adapted).write(tmp_path / "published")
    served = load_weights(tmp_path / "published", read_architecture(tmp_path / "published"), torch.float32, CPU)
    assert torch.equal(served.head, load_file(source / "model.safetensors")["lm_head.weight"].t())
    assert not describe_folder(tmp_path / "published").architecture.tied_embeddings


@pytest.mark.parametrize(("tied", "said"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("family", [Qwen2Config, Qwen3Config, LlamaConfig, Gemma2Config])
def test_every_field_of_a_published_config_is_that_of_the_loaded_model(
    make_model: ModelMaker, tmp_path: Path, family: type[PretrainedConfig], tied: bool, said: bool
) -> None:
    original = make_model(config=family(**SHAPE, head_dim=8, tie_word_embeddings=tied))
    source = shutil.copytree(original, tmp_path / "source")
    changed_config(source, tie_word_embeddings=said, attention_dropout=0.1, torch_dtype="float16", dtype=None)
    PolicyTrainer.from_folder(source, TrainerConfig()).export(tmp_path / "published")
    model = load_policy_model(source, dtype=torch.float32, device=CPU)
    published = AutoConfig.from_pretrained(tmp_path / "published").to_dict()
    in_memory = model.config.to_dict()
    # Engines have no dropout; the folder keeps what the user's next training reads.
    assert (published.pop("attention_dropout"), published.pop("_name_or_path")) == (0.1, str(tmp_path / "published"))
    assert {name: value for name, value in in_memory.items() if name in published} == published
    assert published["tie_word_embeddings"] == tied
    head, embedding = model.causal_lm.get_output_embeddings(), model.causal_lm.get_input_embeddings()
    assert (head.weight is embedding.weight) == tied


@pytest.mark.parametrize("settings", [{"quant_method": "fp8"}, {"quant_method": "bitsandbytes", "load_in_4bit": True}])
def test_quantised_weights_which_the_trainer_would_dequantise_are_refused_by_name(
    make_model: ModelMaker, tmp_path: Path, settings: dict[str, Any]
) -> None:
    folder = shutil.copytree(make_model("qwen2"), tmp_path / "model")
    changed_config(folder, quantization_config=settings)
    message = f"quantization_config has quant_method={settings['quant_method']}.*original weights"
    with pytest.raises(CheckpointError, match=message):
        load_policy_model(folder, dtype=torch.float32, device=CPU)
    with pytest.raises(CheckpointError, match=message):
        describe_folder(folder)
