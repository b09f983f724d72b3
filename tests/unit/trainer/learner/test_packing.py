"""Packing: prefix trees, bins, rows, and log-probabilities equal to padded ones."""

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
from rollmesh.trainer.learner.prefix_tree import PrefixTree, balanced_bins, prefix_bins, prefix_tree
from rollmesh.trainer.learner.train_batch import build_train_batch
from rollmesh.types import Int32Array

from ....kit.made_batches import CONFIGS, SHAPE, VOCAB, random_batch
from .conftest import ModelMaker

WORDS = st.lists(st.integers(0, 2), max_size=9)
"""Few tokens, so that many sequences begin alike, are equal, or continue another one."""
SEQUENCES = st.lists(WORDS, max_size=14)


def arrays(sequences: list[list[int]]) -> list[Int32Array]:
    return [np.array(ids, np.int32) for ids in sequences]


def beginnings(sequences: list[list[int]]) -> set[tuple[int, ...]]:
    """All distinct beginnings: the nodes of a trie, counted by a set."""
    return {tuple(ids[:n]) for ids in sequences for n in range(1, len(ids) + 1)}


def row_of(tree: PrefixTree, sequences: list[Int32Array]) -> tuple[list[int], list[int]]:
    tokens, positions = list[int](), list[int]()
    for branch in tree.branches:
        assert branch.start == len(tokens) < branch.end <= branch.stop
        places = range(branch.depth, branch.depth + branch.end - branch.start)
        tokens += sequences[branch.source][places.start : places.stop].tolist()
        positions += places
    return tokens, positions


@given(SEQUENCES, st.sampled_from([None, 1, 2, 5, 30]))
def test_the_path_of_a_sequence_spells_it_at_its_positions(words: list[list[int]], least_saved: int | None) -> None:
    sequences = arrays(words)
    tree = prefix_tree(sequences, least_saved)
    tokens, positions = row_of(tree, sequences)
    for ids, last in zip(words, tree.last, strict=True):
        path = tree.path(last).tolist()
        assert [tokens[row] for row in path] == ids
        assert [positions[row] for row in path] == list(range(len(ids)))
    whole = sum(map(len, words))
    assert len(tokens) == {None: whole, 1: len(beginnings(words))}.get(least_saved, len(tokens))
    assert len(beginnings(words)) <= len(tokens) <= whole


@given(SEQUENCES)
def test_what_continues_a_branch_follows_it_in_the_row(words: list[list[int]]) -> None:
    tree = prefix_tree(arrays(words), 1)
    for row, branch in enumerate(tree.branches):
        above = set[int]()
        parent = branch.parent
        while parent >= 0:
            above.add(parent)
            parent = tree.branches[parent].parent
        for other, candidate in enumerate(tree.branches):
            inside = candidate.end <= branch.start and branch.end <= candidate.stop
            assert inside == (other in above), (row, other)


def test_a_stretch_is_shared_only_where_it_saves_enough() -> None:
    group = [[1, 2, 3, 10 + i] for i in range(4)]  # the prompt is saved three times: 9 tokens
    assert len(row_of(prefix_tree(arrays(group), 9), arrays(group))[0]) == 3 + 4
    assert len(row_of(prefix_tree(arrays(group), 10), arrays(group))[0]) == 4 * 4
    # Two groups have their first token in common, which saves one; each computes it, and shares its own prompt.
    other = [[1, 7, 8, 10 + i] for i in range(4)]
    assert len(row_of(prefix_tree(arrays([*group, *other]), 9), arrays([*group, *other]))[0]) == 2 * (3 + 4)
    assert prefix_tree(arrays(group), None).last == (0, 1, 2, 3)


@given(SEQUENCES, st.integers(1, 40), st.integers(1, 3), st.sampled_from([None, 1, 4]))
def test_bins_of_trees_hold_every_sequence_once_within_the_budget(
    words: list[list[int]], budget: int, multiple: int, least_saved: int | None
) -> None:
    sequences = arrays([[*ids, 0] for ids in words])  # the last token is no input
    bins = prefix_bins(sequences, budget, multiple, least_saved)
    assert sorted(i for b in bins for i in b) == list(range(len(words)))
    assert len(bins) % multiple == 0
    longest = max(map(len, words), default=0)
    for chosen in bins:
        computed = len(
            row_of(prefix_tree(arrays([words[i] for i in chosen]), least_saved), arrays([words[i] for i in chosen]))[0]
        )
        assert computed <= (budget if longest <= budget else max(budget, int(1.25 * longest)))


def test_a_group_stays_in_one_bin_where_it_fits_and_its_prompt_is_computed_once() -> None:
    rng = np.random.default_rng(0)
    groups = [rng.integers(0, 50, 40) for _ in range(6)]
    sequences = [
        np.concatenate([prompt, rng.integers(0, 50, 11)]).astype(np.int32) for prompt in groups for _ in range(4)
    ]
    order = rng.permutation(24)
    bins = prefix_bins([sequences[i] for i in order], 170, least_saved=1)  # two groups of 40 + 4 * 10 tokens
    assert [len(b) for b in bins] == [8, 8, 8]
    assert all(len({int(order[i]) // 4 for i in b}) == 2 for b in bins)


def test_a_group_above_the_budget_is_divided_into_as_few_bins_as_hold_it() -> None:
    prompt = np.arange(2048) % 90
    group = [np.concatenate([prompt, np.full(513, 100 + i)]).astype(np.int32) for i in range(16)]
    assert sorted(map(len, prefix_bins(group, 4096, least_saved=1))) == [4, 4, 4, 4]
    # A prompt above the budget: the answers stay with it, in bins of 1.25 times the longest trajectory.
    assert len(prefix_bins(group, 1024, least_saved=1)) == 8
    assert sorted(map(len, prefix_bins(group[:8], 8192, 2, 1))) == [4, 4]  # one for each rank


@pytest.mark.parametrize(("groups", "ranks"), [(3, 2), (4, 3), (5, 4), (10, 8), (8, 8)])
def test_ranks_wait_for_no_more_tokens_than_without_sharing(groups: int, ranks: int) -> None:
    rng = np.random.default_rng(0)
    sequences = [
        np.concatenate([prompt, rng.integers(0, 1000, rng.integers(50, 150))]).astype(np.int32)
        for prompt in rng.integers(0, 1000, (groups, 24))
        for _ in range(8)
    ]

    def waited(least_saved: int | None) -> int:
        bins = prefix_bins(sequences, 8192, ranks, least_saved)
        rows = [row_of(prefix_tree(each, least_saved), each)[0] for each in ([sequences[i] for i in b] for b in bins)]
        return sum(max(map(len, rows[at : at + ranks])) for at in range(0, len(rows), ranks))

    assert waited(96) <= waited(None)


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
