"""The head: values, gradients and memory of log-probabilities over chunks of logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, MiniCPM3Config, PretrainedConfig, Qwen2Config

from benchmarks.allocation import peak_bytes
from rollmesh.config.trainer import TrainerConfig
from rollmesh.trainer.learner.packing import pack_sequences
from rollmesh.trainer.learner.policy_model import load_policy_model
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.trainer.learner.token_scores import CHUNK_LOGITS, score_tokens

from ....kit.made_batches import SHAPE, VOCAB, random_batch
from .conftest import IDS, VERSIONS, ModelMaker

TOKENS, WIDTH = 23, 8
LARGE_VOCAB = 151_936
OTHER_HEADS: dict[str, PretrainedConfig] = {
    "soft cap": Gemma2Config(**SHAPE, head_dim=8, final_logit_softcapping=2.0),
    "scale": CohereConfig(**SHAPE, logit_scale=0.3),
    "scaled hidden states": MiniCPM3Config(
        **{**SHAPE, "num_key_value_heads": 4},
        **dict.fromkeys(["qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"], 8),
        q_lora_rank=8,
        kv_lora_rank=8,
        dim_model_base=8,
    ),
}


def plain(hidden: Tensor, head: torch.nn.Linear, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """The definitions, with all logits at once."""
    scores = (head(hidden) / temperatures[:, None]).log_softmax(-1)
    return scores[torch.arange(len(targets)), targets], -(scores.exp() * scores).sum(-1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 23, 100])
def test_scores_and_gradients_are_those_of_all_logits_at_once(chunk_tokens: int, bias: bool) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(WIDTH, VOCAB, bias=bias).double()
    hidden = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    targets, temperatures = torch.randint(0, VOCAB, (TOKENS,)), torch.rand(TOKENS) + 0.5
    got = score_tokens(
        hidden, head.weight, head.bias, targets, temperatures, entropy=True, chunk_logits=chunk_tokens * VOCAB
    )
    expected = plain(hidden, head, targets, temperatures.double())
    assert not got[1].requires_grad
    inputs, losses = [hidden, *head.parameters()], [(x[0] * torch.arange(TOKENS)).sum() for x in (got, expected)]
    gradients = [torch.autograd.grad(loss, inputs) for loss in losses]
    for mine, theirs in zip((*got, *gradients[0]), (*expected, *gradients[1]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_a_frozen_head_has_no_gradient_and_tokens_without_any_give_zero() -> None:
    weight = torch.randn(VOCAB, WIDTH)
    hidden, targets = torch.randn(TOKENS, WIDTH, requires_grad=True), torch.arange(TOKENS)
    score_tokens(hidden, weight, None, targets, None, entropy=False)[0].sum().backward()
    assert weight.grad is None and hidden.grad is not None and bool(hidden.grad.abs().sum() > 0)
    trained = weight.clone().requires_grad_()
    logprobs, entropy = score_tokens(hidden[:0], trained, None, targets[:0], None, entropy=True)
    logprobs.sum().backward()
    assert len(logprobs) == len(entropy) == 0 and torch.equal(trained.grad, torch.zeros_like(trained))


def test_under_autocast_products_are_in_bfloat16_and_sums_in_float32() -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(WIDTH, VOCAB)
    hidden, targets = torch.randn(TOKENS, WIDTH, requires_grad=True), torch.arange(TOKENS)
    with torch.autocast("cpu", torch.bfloat16):
        logits = head(hidden)
        got, _ = score_tokens(hidden, head.weight, head.bias, targets, None, entropy=False, chunk_logits=4 * VOCAB)
    assert logits.dtype == torch.bfloat16 and got.dtype == torch.float32
    expected = logits.float().log_softmax(-1)[torch.arange(TOKENS), targets]
    torch.testing.assert_close(got, expected)
    mine, theirs = (torch.autograd.grad(x.sum(), [hidden, *head.parameters()]) for x in (got, expected))
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == b.dtype and (a - b).abs().max() <= 1e-2 * b.abs().max()


@pytest.mark.parametrize("kind", sorted(OTHER_HEADS))
def test_heads_with_code_of_their_own_have_the_scores_and_gradients_of_the_model(
    make_model: ModelMaker, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_chunks = partial(score_tokens, chunk_logits=5 * VOCAB)
    monkeypatch.setattr("rollmesh.trainer.learner.policy_model.score_tokens", in_chunks)
    folder = make_model(config=OTHER_HEADS[kind])
    model = load_policy_model(folder, dtype=torch.float64, device=torch.device("cpu"))
    assert not model.linear_head
    micro = pack_sequences(IDS, 0.7, torch.device("cpu"))
    logprobs, entropy = model.score(micro, entropy=True)
    logprobs.square().sum().backward()
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    scores = [(own(torch.from_numpy(ids)[None].long()).logits[0, :-1] / 0.7).log_softmax(-1) for ids in IDS]
    expected = torch.cat(
        [s[torch.arange(len(s)), torch.from_numpy(i[1:]).long()] for s, i in zip(scores, IDS, strict=True)]
    )
    expected.square().sum().backward()
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)  # rotary tables and norms are in float32
    torch.testing.assert_close(entropy, torch.cat([-(s.exp() * s).sum(-1) for s in scores]), rtol=0, atol=1e-5)
    theirs = dict(own.named_parameters())
    for name, parameter in model.causal_lm.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("head", ["trained", "frozen", "capped", "half of the tokens truncated"])
def test_no_pass_over_a_large_vocabulary_holds_more_than_one_chunk_of_logits(head: str) -> None:
    tokens, width, chunk_logits = 60, 16, 1 << 21
    weight = torch.randn(LARGE_VOCAB, width, requires_grad=head != "frozen")
    hidden, targets = torch.randn(tokens, width, requires_grad=True), torch.arange(tokens)
    temperatures, own = torch.full((tokens,), 0.7), capped if head == "capped" else None
    kept = torch.arange(0, tokens, 2).expand(2, -1) if "truncated" in head else None  # each its own token alone

    def score() -> Tensor:
        columns, options = (targets, temperatures, kept), {"own_logits": own, "chunk_logits": chunk_logits}
        return score_tokens(hidden, weight, None, *columns, entropy=True, **options)[0]

    def score_without_gradient() -> None:
        with torch.no_grad():
            score()

    logits, chunk = 4 * tokens * LARGE_VOCAB, 4 * chunk_logits
    gradient = weight.nbytes if weight.requires_grad else 0
    of_cap = {"scores": 3 * chunk, "gradient": 6 * chunk}  # its steps are tensors of their own
    most = of_cap if own else dict.fromkeys(of_cap, chunk)
    found = {"scores": peak_bytes(score_without_gradient), "gradient": peak_bytes(lambda: score().sum().backward())}
    assert logits > 4 * chunk and found["gradient"] >= 0.9 * chunk + gradient
    assert found["scores"] <= most["scores"] + (1 << 20)
    assert found["gradient"] <= most["gradient"] + gradient + (1 << 20)


def test_a_train_step_over_a_large_vocabulary_holds_one_chunk_of_logits_with_old_logprobs_and_a_kl_too(
    make_model: ModelMaker,
) -> None:
    folder = make_model(
        config=Qwen2Config(**{**SHAPE, "vocab_size": LARGE_VOCAB, "hidden_size": 16}, tie_word_embeddings=True)
    )
    algorithm = {"loss": "decoupled_ppo", "old_logprobs": "recompute", "kl_coefficient": 0.1, "masks": ["m2po"]}
    config = TrainerConfig.model_validate({"algorithm": algorithm, "tokens_per_microbatch": 1024})
    trainer = PolicyTrainer(folder, config, policy_folder=lambda version: folder)
    batch = random_batch(1, groups=2, members=4, longest=140)
    tokens = sum(t.response_token_count for group in batch.groups for t in group.trajectories)
    reports = []
    peak = peak_bytes(lambda: reports.append(trainer.train(batch, VERSIONS)))
    (report,) = reports
    weight, chunk = 4 * LARGE_VOCAB * 16, 4 * CHUNK_LOGITS
    assert report.policy.kl_reference is not None and report.microbatches == 1
    assert chunk < peak < chunk + 8 * weight < 4 * tokens * LARGE_VOCAB / 2, (
        "weights are gradients, reference and update"
    )


def capped(hidden: Tensor, linear: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.tanh(linear(hidden) / 30) * 30
