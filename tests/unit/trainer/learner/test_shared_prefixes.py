"""Sharing prefixes changes what is computed, and nothing of what comes out: scores, loss and gradient."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollmesh.config.loss_methods import LOSSES
from rollmesh.config.trainer import AlgorithmConfig
from rollmesh.errors import ConfigError
from rollmesh.trainer.learner.distributed import World
from rollmesh.trainer.learner.forward_backward import (
    Compute,
    GradientPass,
    TokenColumns,
    accumulate_gradient,
    score_sequences,
    score_with_entropy,
)
from rollmesh.trainer.learner.method_binding import loss_recipe
from rollmesh.trainer.learner.packed_attention import PackedLayout, packed_attention
from rollmesh.trainer.learner.policy_model import PolicyModel, load_policy_model
from rollmesh.trainer.learner.policy_scorer import _Float64
from rollmesh.trainer.learner.prefix_tree import prefix_tree
from rollmesh.trainer.learner.train_batch import TrainBatch, build_train_batch
from rollmesh.types import Int32Array

from ....kit.made_batches import VOCAB, batch_of, forked_groups, with_kept_sets
from .conftest import VERSIONS, ModelMaker
from .test_packing import OTHERS, alone

CPU, GPU = torch.device("cpu"), torch.cuda.is_available()
PLAIN = Compute(device=CPU, world=World(), token_budget=48, autocast=False)
SHARED = replace(PLAIN, least_saved=1)


def flat_batch(seed: int) -> TrainBatch:
    """Forks with random advantages, every other batch with kept sets."""
    batch = batch_of(*forked_groups(seed, 1 + seed % 3))
    flat = build_train_batch(with_kept_sets(batch, seed, full=0.3) if seed % 2 else batch, VERSIONS, None)
    return replace(flat, advantages=np.random.default_rng(seed).normal(size=flat.trajectory_count))


def columns_of(flat: TrainBatch, logprobs: np.ndarray) -> TokenColumns:
    """Old log-probabilities around those of the policy, different for the members that share a token."""
    rng = np.random.default_rng(1)
    near = [torch.from_numpy(logprobs + rng.normal(0, 0.4, len(logprobs))) for _ in range(3)]
    return TokenColumns(
        old_logprobs=near[0],
        policy_share=torch.zeros(len(logprobs), dtype=torch.float64),
        behavior_logprobs=near[1],
        advantages=torch.from_numpy(flat.advantages[flat.unit_index]),
        mask=torch.from_numpy(flat.policy_mask & (rng.random(len(logprobs)) < 0.9)),
        sequence_index=torch.from_numpy(flat.sequence_index),
        reference_logprobs=near[2],
    )


def gradient_of(
    model: PolicyModel, compute: Compute, loss: str, flat: TrainBatch, columns: TokenColumns
) -> tuple[GradientPass, torch.Tensor]:
    model.zero_grad()
    recipe = loss_recipe(AlgorithmConfig(loss=loss, kl_coefficient=0.1, old_logprobs="recompute"))
    done = accumulate_gradient(model, compute, recipe, flat, columns, np.arange(flat.trajectory_count))
    return done, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def relative(found: torch.Tensor | np.ndarray, expected: torch.Tensor | np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(found) - np.asarray(expected)) / np.linalg.norm(np.asarray(expected)))


@pytest.fixture(scope="module", params=[torch.float64, torch.float32], ids=["float64", "float32"])
def model(request: pytest.FixtureRequest, make_model: ModelMaker) -> PolicyModel:
    return load_policy_model(make_model("qwen3"), dtype=request.param, device=CPU)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(seed=st.integers(0, 10_000), loss=st.sampled_from(sorted(LOSSES.methods)), budget=st.sampled_from([16, 4096]))
def test_scores_loss_and_gradient_of_random_trees_are_those_of_plain_passes(
    model: PolicyModel, seed: int, loss: str, budget: int
) -> None:
    exact = next(model.parameters()).dtype == torch.float64
    bound = 1e-12 if exact else 1e-5
    flat = flat_batch(seed)
    every = np.arange(flat.trajectory_count)
    plain, shared = (replace(compute, token_budget=budget) for compute in (PLAIN, SHARED))
    with _Float64(model) if exact else nullcontext():  # norms compute in float32 otherwise
        scores = score_with_entropy(model, plain, flat, every)
        assert relative(score_with_entropy(model, shared, flat, every), scores) < bound
        columns = columns_of(flat, scores[0])
        expected, gradient = gradient_of(model, plain, loss, flat, columns)
        found, got = gradient_of(model, shared, loss, flat, columns)
    assert relative(got, gradient) < bound
    assert found.loss == pytest.approx(expected.loss, rel=bound, abs=bound)
    assert relative(found.logprobs, expected.logprobs) < bound
    assert relative(found.entropy, expected.entropy) < bound
    assert found.forward_tokens <= expected.forward_tokens


def forks() -> list[Int32Array]:
    rng = np.random.default_rng(0)
    base = rng.integers(0, VOCAB, 30)
    cut = [np.concatenate([base[:n], rng.integers(0, VOCAB, more)]) for n, more in ((9, 5), (9, 12), (20, 3), (30, 0))]
    return [ids.astype(np.int32) for ids in (*cut, base[:15], base)]


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_other_architectures_share_exactly_too(make_model: ModelMaker, name: str) -> None:
    folder = make_model(config=OTHERS[name])
    model = load_policy_model(folder, dtype=torch.float64, device=CPU, longest=30)
    for got, expected in zip(score_sequences(model, SHARED, forks(), 1.0), alone(folder, forks()), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_a_model_that_ignores_positions_shares_nothing_and_is_refused_by_name_when_it_must(
    make_model: ModelMaker,
) -> None:
    model = load_policy_model(make_model("llama"), dtype=torch.float32, device=CPU)
    assert PLAIN.sharing(model, "auto", 64).least_saved == 96 and PLAIN.sharing(model, False, 64).least_saved is None
    model.causal_lm.base_model.register_forward_pre_hook(
        lambda _, args, given: (args, {**given, "position_ids": None}), with_kwargs=True
    )  # positions are then the places in the row; packed sequences do not notice, because RoPE is relative
    assert PLAIN.sharing(model, "auto", 64).least_saved is None
    with pytest.raises(ConfigError, match=r"trainer\.share_prefixes=true: LlamaForCausalLM ignores the positions"):
        PLAIN.sharing(model, True, 64)


def attention_of(sequence: torch.Tensor, window: int | None, softcap: float | None) -> torch.Tensor:
    """Query, key and value of one sequence, [3, tokens, heads, size], token by token and head by head."""
    query, key, value = sequence.double()
    out = torch.zeros_like(query)
    for token in range(len(query)):
        first = 0 if window is None else max(0, token + 1 - window)
        for head in range(query.shape[1]):
            scores = key[first : token + 1, head] @ query[token, head] / query.shape[2] ** 0.5
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            out[token, head] = scores.softmax(0) @ value[first : token + 1, head]
    return out


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (4, None), (None, 0.5), (4, 0.5)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not GPU, reason="no GPU"))])
def test_a_branch_reads_the_keys_of_its_path(device: str, window: int | None, softcap: float | None) -> None:
    dtype, bound = (torch.float64, 1e-12) if device == "cpu" else (torch.bfloat16, 2e-2)
    tree = prefix_tree(forks(), 1)
    random = torch.Generator().manual_seed(0)
    packed = torch.randn(3, 1, 2, 16, tree.branches[-1].stop, generator=random).to(dtype)
    packed = packed.transpose(3, 4).requires_grad_()  # of a layout that no kernel takes
    layout, options = PackedLayout.of(tree, torch.device(device)), {"sliding_window": window, "softcap": softcap}
    out, _ = packed_attention(torch.nn.Identity(), *packed.to(device), None, scaling=16**-0.5, layout=layout, **options)
    found, expected = list[torch.Tensor](), list[torch.Tensor]()
    for last in tree.last:
        rows = torch.from_numpy(tree.path(last))
        found.append(out[0].cpu().double()[rows])
        expected.append(attention_of(packed[:, 0, :, rows].transpose(1, 2), window, softcap))
    scale = torch.randn(2, 16, generator=random, dtype=torch.float64)
    gradients = [torch.autograd.grad((torch.cat(x) * scale).sum(), packed)[0] for x in (found, expected)]
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), rtol=0, atol=bound)
    torch.testing.assert_close(*gradients, rtol=0, atol=5 * bound)
