"""A published adapter is a PEFT folder, and every reader computes the policy that was trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.manifest import CanarySequence
from rollmesh.checkpoints.policies import BasePolicy, VerifiedPolicy
from rollmesh.config.model import AdapterConfig
from rollmesh.config.trainer import TrainerConfig
from rollmesh.errors import CheckpointError
from rollmesh.trainer.learner.policy_files import WriteWeights
from rollmesh.trainer.learner.policy_scorer import PolicyScorer, write_merged
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer

from ....kit.made_batches import VOCAB, random_batch
from .conftest import ModelMaker

IDS = [np.random.default_rng(3).integers(0, VOCAB, n).astype(np.int32) for n in (9, 17)]
CANARY = [CanarySequence(token_ids=[1, 2], logprobs=[-1.0])]
Change = Callable[[Path], None]


class Published:
    """A run's base and one adapter, in a checkpoint store."""

    def __init__(self, root: Path, trainer: PolicyTrainer) -> None:
        self.store = CheckpointStore(root, b"secret")
        self.trainer = trainer
        base = self.store.publish(**self._draft(0, trainer.copy_out(base=True).write))
        self.base = BasePolicy(record=base, manifest=self.store.open(base).manifest)

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
    trainer = PolicyTrainer.from_folder(model, TrainerConfig(learning_rate=3e-2), adapter=adapter)
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
    assert policy.base is not None
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
    scorer = PolicyScorer.from_policy(published.policy(), device="cpu", dtype=torch.float64)
    exact, moved = scorer.logprobs(IDS), scorer.resolution(IDS)
    assert exact[0].dtype == np.float64
    for values, trainers, bits in zip(exact, published.trainer.logprobs(IDS), moved, strict=True):
        assert values == pytest.approx(trainers, abs=1e-5)
        assert 0 < bits.max() < 1e-5


def test_the_merged_folder_is_the_adapted_policy(published: Published, tmp_path: Path) -> None:
    write_merged(published.policy(), tmp_path / "merged")
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
        PolicyTrainer.from_folder(one.policy().folder, TrainerConfig())
