"""Published policies as models: adapters above their base, float64 scores, the resolution of float32."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.manifest import CanarySequence
from rollmesh.checkpoints.policies import VerifiedPolicy
from rollmesh.config.model import AdapterConfig
from rollmesh.config.trainer import TrainerConfig
from rollmesh.errors import CheckpointError
from rollmesh.trainer.learner.policy_files import WriteWeights
from rollmesh.trainer.learner.policy_scorer import PolicyScorer, write_merged_policy
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer

from ....kit.made_batches import random_batch
from .conftest import IDS, ModelMaker

CANARY = [CanarySequence(token_ids=[1, 2], logprobs=[-1.0])]

Change = Callable[[Path], None]


class Published:
    """A run's base and one adapter, in a checkpoint store."""

    def __init__(self, root: Path, trainer: PolicyTrainer) -> None:
        self.store = CheckpointStore(root, b"secret")
        self.trainer = trainer
        self.base = self.store.publish(**self._draft(0, trainer.copy_out(base=True).write))

    def policy(self, change: Change = lambda _: None) -> VerifiedPolicy:
        """The trained adapter, published after a change of its folder."""
        write = self.trainer.copy_out().write

        def write_and_change(folder: Path) -> dict[str, str] | None:
            write(folder)
            change(folder)
            return None

        return self.store.open(self.store.publish(**self._draft(1, write_and_change), base=self.base))

    @staticmethod
    def _draft(version: int, write: WriteWeights | Callable[[Path], Any]) -> dict[str, Any]:
        names = {"policy_version": version, "train_step": version, "parent": version - 1 if version else None}
        return {"session": "s", "write": write, "canary": CANARY, **names}


def trained(model: Path, adapter: AdapterConfig) -> PolicyTrainer:
    trainer = PolicyTrainer(model, TrainerConfig(learning_rate=3e-2), adapter=adapter)
    for step in (1, 2):
        trainer.train(random_batch(step, train_step=step), {0: 0, 1: 1, 2: 2})
    return trainer


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "llama"])
def trainer(request: pytest.FixtureRequest, make_model: ModelMaker) -> PolicyTrainer:
    """A trained adapter; the tests publish it and train no further."""
    return trained(make_model(request.param), AdapterConfig(rank=4, alpha=8))


@pytest.fixture(scope="module")
def trainer_of_one_layer(make_model: ModelMaker) -> PolicyTrainer:
    return trained(make_model("qwen2"), AdapterConfig(rank=4, alpha=8, target=("q_proj",)))


@pytest.fixture
def published(trainer: PolicyTrainer, tmp_path: Path) -> Published:
    return Published(tmp_path / "store", trainer)


@pytest.fixture
def one(trainer_of_one_layer: PolicyTrainer, tmp_path: Path) -> Published:
    return Published(tmp_path / "store", trainer_of_one_layer)


def logprobs(model: Any, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0].log_softmax(-1)
    return logits[torch.arange(len(ids) - 1), torch.from_numpy(ids[1:].astype(np.int64))].numpy()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft calls it
def test_peft_loads_the_folder_above_the_base(published: Published) -> None:
    policy = published.policy()
    assert sorted(path.name for path in policy.folder.iterdir()) == [
        *("adapter_config.json", "adapter_model.safetensors", "manifest.json")
    ]
    base = AutoModelForCausalLM.from_pretrained(policy.base.folder)
    model = PeftModel.from_pretrained(base, policy.folder).eval()
    for ids, expected in zip(IDS, published.trainer.logprobs(IDS), strict=True):
        assert logprobs(model, ids) == pytest.approx(expected, abs=1e-5)
        with model.disable_adapter():
            assert np.abs(logprobs(model, ids) - expected).max() > 1e-3, "the adapter changes the policy"


def test_readers_apply_the_adapter_above_its_base(published: Published) -> None:
    scores = PolicyScorer.from_policy(published.policy(), device="cpu").logprobs(IDS)
    for ours, trainers in zip(scores, published.trainer.logprobs(IDS), strict=True):
        assert np.array_equal(ours, trainers)


def test_a_reader_in_float64_measures_the_resolution_of_an_adapter(published: Published) -> None:
    scorer = PolicyScorer.from_policy(published.policy(), device="cpu").in_dtype(torch.float64)
    exact, moved = scorer.logprobs(IDS), scorer.resolution(IDS)
    assert exact[0].dtype == np.float64
    for values, trainers, bits in zip(exact, published.trainer.logprobs(IDS), moved, strict=True):
        assert values == pytest.approx(trainers, abs=1e-5)
        assert 0 < bits.max() < 1e-5


def test_the_merged_folder_is_the_adapted_policy(published: Published, tmp_path: Path) -> None:
    write_merged_policy(published.policy(), tmp_path / "merged")
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    for ids, expected in zip(IDS, published.trainer.logprobs(IDS), strict=True):
        assert logprobs(model, ids) == pytest.approx(expected, abs=1e-4)


def set_field(name: str, value: object) -> Change:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))

    return change


def rename_layer(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    save_file({name.replace("layers.1", "layers.7"): t for name, t in load_file(file).items()}, file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_field("use_rslora", True), "use_rslora=True is refused: rsLoRA scales by .*; merge it into its base"),
        (set_field("use_dora", True), "use_dora=True is refused"),
        (set_field("bias", "all"), "bias='all' is refused"),
        (set_field("modules_to_save", ["lm_head"]), r"modules_to_save=\['lm_head'\] is refused"),
        (set_field("target_modules", ["q_proj", "lm_head"]), "target_modules=.* is refused: embeddings and lm_head"),
        (set_field("trainable_token_indices", [3]), r"trainable_token_indices=\[3\] is refused: added"),
        (set_field("target_parameters", ["experts.w1"]), "target_parameters=.* is refused: experts"),
        (set_field("peft_type", "IA3"), "peft_type='IA3' is refused"),
        (set_field("r", 0), "adapter_config.json: r: "),
        (set_field("r", 64), r"does not fit its base: model\.adapter\.rank=64"),
        (set_field("r", 8), "does not match this model"),
        (set_field("target_modules", ["k_proj"]), "are not A and B of the adapted layers"),
        (rename_layer, "are not A and B of the adapted layers: .* in total"),
    ],
)
def test_readers_refuse_an_adapter_that_they_would_not_apply_as_trained(
    one: Published, change: Change, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        PolicyScorer.from_policy(one.policy(change))


def test_an_adapter_is_refused_where_full_weights_are_expected(one: Published) -> None:
    with pytest.raises(CheckpointError, match="contains an adapter .*; merge it into its base"):
        PolicyTrainer(one.policy().folder, TrainerConfig())


_SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}

CONFIGS = {
    "llama": LlamaConfig(**_SHAPE),
    "qwen3": Qwen3Config(**_SHAPE, head_dim=8),
}


def made_model(name: str) -> PreTrainedModel:
    """A random model whose distributions are far from uniform."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0 if parameter.ndim > 1 else 1.0)
    return model.eval()


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight.double() * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


@torch.no_grad()
def written_out(model: PreTrainedModel, ids: np.ndarray) -> np.ndarray:
    """The same forward pass from its formulas, float64 but for the angles; float64 [tokens - 1]."""
    inner, config = model.model, model.config
    eps, tokens = config.rms_norm_eps, torch.from_numpy(ids.astype(np.int64))
    angles = torch.arange(len(ids), dtype=torch.float32)[:, None] * inner.rotary_emb.inv_freq
    cos, sin = (torch.cat([table, table], -1).double() for table in (angles.cos(), angles.sin()))
    x = inner.embed_tokens.weight.double()[tokens]
    hidden_from = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)
    for layer in inner.layers:
        attention, normed = layer.self_attn, norm(x, layer.input_layernorm.weight, eps)
        parts = []
        for name in ("q", "k", "v"):
            heads = (normed @ getattr(attention, f"{name}_proj").weight.double().T).unflatten(
                -1, (-1, attention.head_dim)
            )
            if name != "v":
                if hasattr(attention, f"{name}_norm"):
                    heads = norm(heads, getattr(attention, f"{name}_norm").weight, eps)
                heads = rotated(heads, cos[:, None], sin[:, None])
            parts.append(heads.transpose(0, 1))
        q, k, v = parts[0], *(part.repeat_interleave(2, 0) for part in parts[1:])
        weights = (q @ k.transpose(1, 2) / attention.head_dim**0.5).masked_fill(hidden_from, -torch.inf).softmax(-1)
        x = x + (weights @ v).transpose(0, 1).flatten(1) @ attention.o_proj.weight.double().T
        normed, mlp = norm(x, layer.post_attention_layernorm.weight, eps), layer.mlp
        gate = normed @ mlp.gate_proj.weight.double().T
        up = normed @ mlp.up_proj.weight.double().T
        x = x + (gate * gate.sigmoid() * up) @ mlp.down_proj.weight.double().T
    logits = norm(x, inner.norm.weight, eps) @ model.lm_head.weight.double().T
    return logits[:-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0].numpy()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_float64_judge_computes_norms_in_float64_and_keeps_the_rotary_tables_of_float32(
    tmp_path: Path, name: str
) -> None:
    model = made_model(name)
    model.save_pretrained(tmp_path)
    ids = np.random.default_rng(3).integers(0, 61, 600).astype(np.int32)
    scorer = PolicyScorer.from_folder(tmp_path, device="cpu")
    for judge in (
        PolicyScorer.from_folder(tmp_path, device="cpu", dtype=torch.float64),
        scorer.in_dtype(torch.float64),
    ):
        (scores,) = judge.logprobs([ids])
        np.testing.assert_allclose(scores, written_out(model, ids), atol=1e-11)
    assert scorer.logprobs([ids])[0].dtype == np.float32, "the copy leaves its origin alone"


def test_the_resolution_knows_that_float32_rounds_the_angles_of_late_positions(tmp_path: Path) -> None:
    made_model("llama").save_pretrained(tmp_path)
    ids = np.tile(np.random.default_rng(3).integers(0, 61, 30), 30).astype(np.int32)
    judge = PolicyScorer.from_folder(tmp_path, device="cpu", dtype=torch.float64)
    before = judge.logprobs([ids])[0]
    (resolution,) = judge.resolution([ids])
    assert resolution.shape == before.shape and resolution.min() > 0
    early, late = resolution[30:150].mean(), resolution[-120:].mean()
    assert late > 1.5 * early, (early, late)
    np.testing.assert_array_equal(judge.logprobs([ids])[0], before, "weights and positions are put back")


def test_a_float32_scorer_has_no_resolution(tmp_path: Path) -> None:
    made_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="needs a scorer with dtype=torch.float64"):
        PolicyScorer.from_folder(tmp_path, device="cpu").resolution([np.array([1, 2], np.int32)])
