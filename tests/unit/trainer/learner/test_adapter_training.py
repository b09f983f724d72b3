"""A run with an adapter trains A and B only, and scores other versions in the same model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rollmesh.algorithms.ratios import k3
from rollmesh.config.model import AdapterConfig
from rollmesh.config.trainer import TrainerConfig
from rollmesh.errors import ConfigError
from rollmesh.trainer.learner.policy_scorer import PolicyScorer
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.types import Batch

from ....kit.made_batches import batch_of, policy_segment, random_batch, trajectory
from .conftest import IDS, VERSIONS, ModelMaker, make_trainer, response_scores, trained

ADAPTER = AdapterConfig(rank=4, alpha=8)


def make(folder: Path, adapter: AdapterConfig | None = ADAPTER, **options: Any) -> PolicyTrainer:
    return make_trainer(folder, adapter, learning_rate=3e-2, **options)


def weights(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in trainer.state_tensors().items() if n.startswith("model.")}


def same(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_new_adapter_gives_the_logprobs_of_the_base_bit_for_bit(make_model: ModelMaker) -> None:
    folder = make_model("qwen2")
    adapted, base = make(folder).logprobs(IDS), make(folder, None).logprobs(IDS)
    assert all(np.array_equal(a, b) for a, b in zip(adapted, base, strict=True))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_only_the_adapter_is_trained(make_model: ModelMaker, tmp_path: Path, checkpointing: bool) -> None:
    folder = make_model("qwen2")
    trainer = make(folder, gradient_checkpointing=checkpointing)
    before = weights(trainer)
    trained(trainer)
    after = weights(trainer)
    assert len(after) == 2 * 2 * 7, "A and B of seven layers in two blocks"
    assert all(name.startswith("model.base_model.model.model.layers.") for name in after)
    assert not any(torch.equal(before[name], after[name]) for name in after)
    states = {name.removeprefix("optimizer.") for name in trainer.state_tensors() if name.startswith("optimizer.")}
    assert {name.rpartition(".")[0] for name in states} == {name.removeprefix("model.") for name in after}
    trainer.copy_out(base=True).write(tmp_path / "base")
    assert same(load_file(tmp_path / "base" / "model.safetensors"), load_file(folder / "model.safetensors"))


def test_the_adapter_starts_with_the_same_noise_at_every_start(make_model: ModelMaker) -> None:
    torch.manual_seed(1)
    first = weights(make(make_model("qwen2")))
    torch.manual_seed(2)
    assert same(first, weights(make(make_model("qwen2"))))
    zero = [name for name, value in first.items() if not value.any()]
    assert zero == [name for name in first if ".lora_B." in name]


def test_a_replayed_run_gives_the_same_adapter_with_dropout_too(make_model: ModelMaker) -> None:
    adapter = ADAPTER.model_copy(update={"dropout": 0.3})
    first, second, without = (trained(make(make_model("qwen2"), a)) for a in (adapter, adapter, ADAPTER))
    assert same(weights(first), weights(second))
    assert not same(weights(first), weights(without)), "the dropout acts in training"
    scores = [first.logprobs(IDS) for _ in range(2)]
    assert all(np.array_equal(a, b) for a, b in zip(*scores, strict=True)), "scores are computed without dropout"


def test_a_gradient_pass_with_dropout_is_not_compared_with_the_engine(make_model: ModelMaker) -> None:
    adapters = ADAPTER, ADAPTER.model_copy(update={"dropout": 0.3})
    compared, dropped = (make(make_model("qwen2"), a).train(random_batch(1), VERSIONS).policy for a in adapters)
    assert compared.logprob_gap_pure.tokens > 0
    assert dropped.logprob_gap_pure.tokens == dropped.logprob_gap_mixed_cache.tokens == 0


def test_all_linear_by_name_is_the_same_adapter(make_model: ModelMaker) -> None:
    names = ("v_proj", "q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    named = make(make_model("qwen2"), AdapterConfig(rank=4, alpha=8, target=names))
    assert named.state_extra() == make(make_model("qwen2")).state_extra()


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (AdapterConfig(rank=4, target=("q_proj", "query")), r"model\.adapter\.target=\['query'\]: no linear .*v_proj"),
        (AdapterConfig(rank=17), r"model\.adapter\.rank=17: above the size of k_proj \(16\); choose at most 16"),
        (AdapterConfig(rank=4, target=("embed_tokens",)), r"model\.adapter\.target=\['embed_tokens'\]"),
    ],
)
def test_targets_and_ranks_that_no_layer_has_are_refused(
    make_model: ModelMaker, adapter: AdapterConfig, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(make_model("qwen2"), adapter)


@pytest.fixture
def versions(make_model: ModelMaker, tmp_path: Path) -> dict[int, Path]:
    """Base, and two trained adapters above it."""
    trainer = make(make_model("qwen2"))
    trainer.copy_out(base=True).write(tmp_path / "0")
    for version in (1, 2):
        trained(trainer, 1).export(tmp_path / str(version))
    return {version: tmp_path / str(version) for version in range(3)}


def mixed_batch(train_step: int) -> Batch:
    rng = np.random.default_rng(0)
    members = [
        trajectory("m.0", [policy_segment(rng, 5, 0), policy_segment(rng, 4, 1), policy_segment(rng, 3, 2)], 1.0),
        trajectory("m.1", [policy_segment(rng, 4, 1), policy_segment(rng, 5, 2)], 0.0),
    ]
    return batch_of(members, train_step=train_step)


@contextmanager
def one_model_in_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a second model is loaded")

    with monkeypatch.context() as context:
        context.setattr("rollmesh.trainer.learner.frozen_policies.load_policy_model", refuse)
        context.setattr("rollmesh.trainer.learner.policy_model.load_policy_model", refuse)
        yield


@pytest.mark.parametrize("reference", [0, 1])
def test_the_reference_is_scored_in_the_policy_model(
    make_model: ModelMaker, versions: dict[int, Path], monkeypatch: pytest.MonkeyPatch, reference: int
) -> None:
    trainer = make(versions[0], kept=versions, algorithm={"kl_coefficient": 0.1, "kl_reference_version": reference})
    trainer.take_weights(versions[2])
    trainer.restore_extra({"train_step": 2})
    expected = make(versions[0])
    expected.take_weights(versions[reference])
    batch, before = mixed_batch(3), weights(trainer)
    pairs = [(response_scores(trainer, t), response_scores(expected, t)) for t in batch.groups[0].trajectories]
    ours, theirs = (torch.from_numpy(np.concatenate(scores)) for scores in zip(*pairs, strict=True))
    with one_model_in_memory(monkeypatch):
        list(trainer.explain(batch, VERSIONS))
        assert same(before, weights(trainer)), "the current adapter is back"
        report = trainer.train(batch, VERSIONS)
    assert report.policy.kl_reference == pytest.approx(float(k3(ours, theirs).mean()), rel=1e-4)
    assert report.policy.kl_reference > 1e-3


def test_snapshots_are_scored_in_the_policy_model(
    make_model: ModelMaker, versions: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(versions[0], kept=versions, algorithm={"old_logprobs": "snapshot"})
    trainer.take_weights(versions[2])
    trainer.restore_extra({"train_step": 2})
    batch, before = mixed_batch(3), weights(trainer)
    with one_model_in_memory(monkeypatch):
        tokens = [t for t in trainer.explain(batch, VERSIONS) if t.trajectory_id == "m.0"]
    assert same(before, weights(trainer)), "the current adapter is back"
    for version, folder in versions.items():
        scorer = make(versions[0])
        scorer.take_weights(folder)
        scores = response_scores(scorer, batch.groups[0].trajectories[0])
        old = {t.position: t.old_logprob for t in tokens if t.policy_version == version}
        assert old == pytest.approx({position: float(scores[position]) for position in old}, abs=1e-5), version


def test_weights_of_every_version_are_restored_and_the_moments_reset(
    make_model: ModelMaker, versions: dict[int, Path]
) -> None:
    trainer = trained(make(versions[0]))
    start = weights(make(versions[0]))
    for version in (1, 0):
        trainer.take_weights(versions[version])
        assert not any(t.any() for n, t in trainer.state_tensors().items() if n.startswith("optimizer."))
        if version:
            read = load_file(versions[version] / "adapter_model.safetensors")
            assert same({n.removeprefix("model."): t for n, t in weights(trainer).items()}, read)
        else:
            assert same(weights(trainer), start), "version 0 is the adapter at its start"


def test_the_base_is_trained_above_as_it_is_published(make_model: ModelMaker, tmp_path: Path) -> None:
    trainer = make(make_model("qwen2"), dtype="bfloat16")
    trainer.copy_out(base=True).write(tmp_path)
    published = PolicyScorer.from_folder(tmp_path).logprobs(IDS)
    assert all(np.array_equal(a, b) for a, b in zip(trainer.logprobs(IDS), published, strict=True))


def test_a_base_in_half_precision_changes_no_bit_of_training_and_scores(make_model: ModelMaker) -> None:
    def trainer(half: bool) -> PolicyTrainer:
        with pytest.MonkeyPatch.context() as context:
            if not half:
                context.setattr("rollmesh.trainer.learner.policy_model.halve_base", lambda _: None)
            return PolicyTrainer(
                make_model("qwen2"),
                TrainerConfig(learning_rate=3e-2),
                adapter=ADAPTER,
                dtype="bfloat16",
                device="cpu",
                mixed_precision=True,
            )

    half, single = trained(trainer(True)), trained(trainer(False))
    layers = [p for n, p in half._model.base_parameters().items() if n.endswith("_proj.weight")]
    assert {p.dtype for p in layers} == {torch.bfloat16}
    assert same(half.state_tensors(), single.state_tensors())
    assert all(np.array_equal(a, b) for a, b in zip(half.logprobs(IDS), single.logprobs(IDS), strict=True))
