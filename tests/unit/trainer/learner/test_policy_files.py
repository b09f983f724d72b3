"""Copies of the policy and the folders written from them: bytes, digests, dtypes, configs."""

import hashlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoConfig,
    Gemma2Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
)

from rollmesh.checkpoints.describe import describe_folder
from rollmesh.config.model import AdapterConfig
from rollmesh.config.trainer import TrainerConfig
from rollmesh.errors import CheckpointError
from rollmesh.generator.engines.torch.architecture import read_architecture
from rollmesh.generator.engines.torch.weights import load_weights
from rollmesh.trainer.learner import policy_files
from rollmesh.trainer.learner.distributed import World
from rollmesh.trainer.learner.policy_files import INDEX_FILE, WEIGHT_FILE, WeightCopy, write_weight_file, write_weights
from rollmesh.trainer.learner.policy_model import load_policy_model
from rollmesh.trainer.learner.policy_scorer import PolicyScorer
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.types import Float32Array

from ....kit.made_batches import SHAPE
from .conftest import IDS, ModelMaker, make_trainer, trained

ADAPTERS = {"full": None, "adapter": AdapterConfig(rank=4, alpha=8, dropout=0.3)}


def make(folder: Path, kind: str = "full", **options: Any) -> PolicyTrainer:
    return make_trainer(folder, ADAPTERS[kind], learning_rate=3e-2, **options)


def same(left: list[Float32Array], right: list[Float32Array]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_copy_scores_as_its_train_step_did_while_later_steps_train(
    make_model: ModelMaker, kind: str, checkpointing: bool
) -> None:
    trainer, alone = (make(make_model("qwen2"), kind, gradient_checkpointing=checkpointing) for _ in range(2))
    for policy in (trainer, alone):
        trained(policy, 1)
    expected = trainer.logprobs(IDS)
    score = trainer.copy_out().score
    with ThreadPoolExecutor(1) as pool:
        scoring = pool.submit(lambda: [score(IDS) for _ in range(20)])
        trained(trainer, 5)
        scores = scoring.result()
    trained(alone, 5)
    assert all(same(found, expected) for found in [*scores, score(IDS)])
    assert not same(trainer.logprobs(IDS), expected), "the later steps changed the weights"
    assert same(trainer.logprobs(IDS), alone.logprobs(IDS)), "scoring changes nothing in training"
    again = trainer.copy_out().score
    assert again is not None and same(again(IDS), alone.logprobs(IDS)), "the next copy scores with its own weights"


@pytest.mark.parametrize("name", ["qwen2", "llama"], ids=["tied head", "head of its own"])
def test_a_copy_writes_the_weights_that_it_scores(make_model: ModelMaker, tmp_path: Path, name: str) -> None:
    trainer = make(make_model(name))
    trained(trainer, 1)
    copied = trainer.copy_out()
    trained(trainer, 1)
    copied.write(tmp_path)
    assert same(copied.score(IDS), PolicyScorer.from_folder(tmp_path, device="cpu").logprobs(IDS))


def test_only_the_model_in_training_scores_weights_that_are_published_in_another_dtype(make_model: ModelMaker) -> None:
    assert make(make_model("qwen2"), dtype="bfloat16").copy_out().score is None


def test_only_the_model_in_training_scores_the_base_of_an_adapter(make_model: ModelMaker) -> None:
    assert make(make_model("qwen2"), "adapter").copy_out(base=True).score is None


def tied_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    return model


def test_a_copy_keeps_the_weights_of_its_time_in_the_publishing_dtype() -> None:
    model, copy = tied_model(), WeightCopy(torch.float32)
    before = model[0].weight.detach().clone()
    taken = copy.take(dict(model.named_parameters()), World())
    with torch.no_grad():
        model[0].weight.add_(1.0)
    assert list(taken) == ["0.weight"], "tied weights occur once"
    assert torch.equal(taken["0.weight"], before)
    assert WeightCopy(torch.bfloat16).take(dict(model.named_parameters()), World())["0.weight"].dtype == torch.bfloat16


def test_only_rank_0_keeps_a_copy() -> None:
    assert WeightCopy(torch.float32).take(dict(tied_model().named_parameters()), World(rank=1, size=2)) == {}


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
    assert described["parameter_count"] == sum(t.numel() for t in tensors.values())


def test_a_model_never_has_more_than_about_32_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_files, "_SHARD_BYTES", 4)
    tensors = {str(number): torch.zeros(10) for number in range(640)}
    assert len(write_weights(tmp_path, tensors)) == 32


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
    trainer = PolicyTrainer(source, TrainerConfig(), adapter=adapter)
    trainer.copy_out(base=adapted).write(tmp_path / "published")
    served = load_weights(tmp_path / "published", read_architecture(tmp_path / "published"), torch.float32, CPU)
    tensors = load_file(source / "model.safetensors")
    scale = tensors["model.norm.weight"] * SHAPE["hidden_size"] ** 0.5  # the last norm is in the head
    torch.testing.assert_close(served.head, (tensors["lm_head.weight"] * scale).t())
    assert not describe_folder(tmp_path / "published")["architecture"].tied_embeddings


@pytest.mark.parametrize(("tied", "said"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("family", [Qwen2Config, Qwen3Config, LlamaConfig, Gemma2Config])
def test_every_field_of_a_published_config_is_that_of_the_loaded_model(
    make_model: ModelMaker, tmp_path: Path, family: type[PretrainedConfig], tied: bool, said: bool
) -> None:
    original = make_model(config=family(**SHAPE, head_dim=8, tie_word_embeddings=tied))
    source = shutil.copytree(original, tmp_path / "source")
    changed_config(source, tie_word_embeddings=said, attention_dropout=0.1, torch_dtype="float16", dtype=None)
    PolicyTrainer(source, TrainerConfig()).export(tmp_path / "published")
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
