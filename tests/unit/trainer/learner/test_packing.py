"""Packing: bins, rows, and log-probabilities equal to padded ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, MistralConfig, OPTConfig, PretrainedConfig

from rollmesh.algorithms.advantages import TrajectoryColumns
from rollmesh.config.trainer import TrainerConfig
from rollmesh.trainer.learner.packing import pack
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.trainer.learner.prefix_tree import balanced_bins
from rollmesh.trainer.learner.train_batch import build_train_batch
from rollmesh.types import Int32Array

from ....kit.made_batches import CONFIGS, SHAPE, VOCAB, random_batch
from .conftest import ModelMaker


def no_advantage(data: TrajectoryColumns) -> torch.Tensor:
    return data.rewards


@given(st.lists(st.integers(1, 300), max_size=60), st.integers(1, 400), st.integers(1, 4))
def test_bins_hold_every_sequence_once_within_the_budget(lengths: list[int], budget: int, multiple: int) -> None:
    bins = balanced_bins(lengths, budget, multiple)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert len(bins) % multiple == 0
    assert sum(not b for b in bins) < multiple
    for b in bins:
        assert len(b) <= 1 or sum(lengths[i] for i in b) <= budget


def test_bins_are_no_more_than_half_again_the_fewest_possible_and_balanced() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(99), 0.9, 150), 16, 520).astype(int).tolist()
    bins = balanced_bins(lengths, 2048)
    loads = [sum(lengths[i] for i in b) for b in bins]
    assert len(bins) <= -(-sum(lengths) // 2048) + 1
    assert max(loads) - min(loads) < 0.1 * 2048


def test_more_ranks_than_sequences_leave_empty_bins() -> None:
    assert balanced_bins([5], 16, 3) == [[0], [], []]


def test_sequences_longer_than_the_budget_make_no_empty_bins() -> None:
    assert balanced_bins([16, 9], 4) == [[0], [1]]
    assert balanced_bins([40, 1, 1, 1], 4) == [[0], [1, 2, 3]]
    assert len(balanced_bins([16_384] * 64, 4096, 8)) == 64


def test_packed_rows_predict_the_tokens_that_a_policy_wrote() -> None:
    batch = build_train_batch(random_batch(1), {0: 0}, no_advantage)
    order = list(range(batch.trajectory_count))[::-1]
    micro = pack(batch, order, torch.device("cpu"))
    assert sorted(micro.token_index.tolist()) == np.flatnonzero(batch.policy_mask).tolist()
    for row, target, place, owner in zip(
        micro.rows, micro.targets, micro.token_index, micro.sequence_index, strict=True
    ):
        assert target == batch.token_ids[place]
        assert micro.input_ids[0, row] == batch.token_ids[place - 1]
        sequence = batch.sequence_index[place]
        assert order[int(owner)] == sequence
        assert micro.position_ids[0, row] == place - 1 - batch.starts[sequence]


def test_a_dummy_micro_batch_scores_nothing() -> None:
    batch = build_train_batch(random_batch(1), {0: 0}, no_advantage)
    micro = pack(batch, [], torch.device("cpu"))
    assert micro.token_count == 1 and len(micro.rows) == 0 and len(micro.token_index) == 0 and VOCAB > 0


OTHERS: dict[str, PretrainedConfig] = {
    "sliding window": MistralConfig(**SHAPE, sliding_window=4),
    "soft-capped scores and logits": Gemma2Config(**SHAPE, head_dim=8, sliding_window=4, final_logit_softcapping=2.0),
    "learned positions and dropout": GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
    ),
    "functional dropout": OPTConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=32,
        max_position_embeddings=64,
    ),
}


def ragged_sequences() -> list[Int32Array]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, n).astype(np.int32) for n in (5, 31, 2, 17, 9, 23)]


def padded(folder: Path, sequences: list[Int32Array], temperature: float) -> list[np.ndarray]:
    """Compute on right-padded input with the model's own attention, for comparison."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    longest = max(map(len, sequences))
    ids = torch.zeros(len(sequences), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.from_numpy(sequence.astype(np.int64))
        mask[row, : len(sequence)] = 1
    with torch.no_grad():
        scores = (model(input_ids=ids, attention_mask=mask).logits / temperature).log_softmax(-1)
    picked = scores[:, :-1].gather(-1, ids[:, 1:, None])[..., 0].numpy()
    return [picked[row, : len(sequence) - 1] for row, sequence in enumerate(sequences)]


def alone(folder: Path, sequences: list[Int32Array]) -> Iterator[np.ndarray]:
    """Each sequence by itself through the model's eager attention."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    for sequence in sequences:
        ids = torch.from_numpy(sequence.astype(np.int64))[None]
        with torch.no_grad():
            scores = model(input_ids=ids).logits.log_softmax(-1)
        yield scores[0, :-1].gather(-1, ids[0, 1:, None])[:, 0].numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_packed_logprobs_equal_padded_ones(make_model: ModelMaker, name: str, temperature: float) -> None:
    folder, sequences = make_model(name), ragged_sequences()
    trainer = PolicyTrainer(folder, TrainerConfig(tokens_per_microbatch=48))
    for got, expected in zip(
        trainer.logprobs(sequences, temperature), padded(folder, sequences, temperature), strict=True
    ):
        np.testing.assert_allclose(got, expected, atol=1e-4)


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_other_architectures_are_packed_exactly_too(make_model: ModelMaker, name: str) -> None:
    folder, sequences = make_model(config=OTHERS[name]), ragged_sequences()
    trainer = PolicyTrainer(folder, TrainerConfig(tokens_per_microbatch=48), compute_dtype=torch.float64)
    for got, expected in zip(trainer.logprobs(sequences), alone(folder, sequences), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)
