"""The head: values, gradients and memory of log-probabilities over chunks of logits."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, MiniCPM3Config, PretrainedConfig

from benchmarks.allocation import peak_bytes
from rollmesh.trainer.learner.packing import pack_sequences
from rollmesh.trainer.learner.policy_model import load_policy_model
from rollmesh.trainer.learner.token_scores import TopTokens, score_tokens, score_top_tokens

from ....kit.made_batches import SHAPE, VOCAB
from .conftest import IDS, ModelMaker

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


@pytest.mark.parametrize("chunk_tokens", [1, 5, 100])
def test_the_most_likely_tokens_are_those_of_all_logits_at_once(chunk_tokens: int) -> None:
    torch.manual_seed(1)
    head = torch.nn.Linear(WIDTH, VOCAB).double()
    hidden = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    targets, heat = torch.randint(0, VOCAB, (TOKENS,)), torch.rand(TOKENS) + 0.5
    columns = (head.weight, head.bias, targets, heat)
    logprobs, ids, values = score_top_tokens(hidden, *columns, 4, chunk_logits=chunk_tokens * VOCAB)
    expected, order = (head(hidden) / heat.double()[:, None]).log_softmax(-1).sort(descending=True)
    torch.testing.assert_close(logprobs, plain(hidden, head, targets, heat.double())[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(values, expected[:, :4], rtol=1e-12, atol=1e-12)
    assert torch.equal(ids, order[:, :4])


def test_the_most_likely_tokens_need_one_chunk_of_logits() -> None:
    hidden, weight = torch.randn(1024, WIDTH), torch.randn(16_384, WIDTH)
    targets, chunk = torch.zeros(1024, dtype=torch.int64), 16_384 * 16
    peak = peak_bytes(lambda: score_top_tokens(hidden, weight, None, targets, None, 8, chunk_logits=chunk))
    assert peak < 1024 * 16_384 * 4 / 8, "an eighth of all logits"


def test_a_frozen_head_has_no_gradient_and_tokens_without_any_give_zero() -> None:
    weight = torch.randn(VOCAB, WIDTH)
    hidden, targets = torch.randn(TOKENS, WIDTH, requires_grad=True), torch.arange(TOKENS)
    score_tokens(hidden, weight, None, targets, None, entropy=False)[0].sum().backward()
    assert weight.grad is None and hidden.grad is not None and bool(hidden.grad.abs().sum() > 0)
    trained = weight.clone().requires_grad_()
    logprobs, entropy = score_tokens(hidden[:0], trained, None, targets[:0], None, entropy=True)
    logprobs.sum().backward()
    assert len(logprobs) == len(entropy) == 0 and torch.equal(trained.grad, torch.zeros_like(trained))


def plain_forward_kl(logprobs: Tensor, top: TopTokens) -> Tensor:
    """The definition: one outcome for each top token and one for all others."""
    kl = torch.zeros(len(logprobs), dtype=torch.float64)
    for t in range(len(logprobs)):
        ids, p = top.ids[t], top.logprobs[t].exp()
        others = [i for i in range(logprobs.shape[1]) if i not in ids.tolist()]
        kl[t] = (p * (top.logprobs[t] - logprobs[t, ids])).sum()
        if others:
            kl[t] = kl[t] + (1 - p.sum()) * ((1 - p.sum()).log() - logprobs[t, others].logsumexp(-1))
    return kl


def top_tokens(k: int) -> TopTokens:
    logprobs, ids = torch.randn(TOKENS, VOCAB, dtype=torch.float64).log_softmax(-1).topk(k)
    return TopTokens(ids=ids, logprobs=logprobs)


@pytest.mark.parametrize("k", [1, 7, VOCAB])
@pytest.mark.parametrize("chunk_tokens", [5, 100])
def test_the_forward_kl_to_top_tokens_has_the_gradient_of_its_definition(chunk_tokens: int, k: int) -> None:
    torch.manual_seed(0)
    head, top = torch.nn.Linear(WIDTH, VOCAB).double(), top_tokens(k)
    hidden = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    targets, temperatures = torch.randint(0, VOCAB, (TOKENS,)), torch.rand(TOKENS, dtype=torch.float64) + 0.5
    got = score_tokens(
        hidden, head.weight, head.bias, targets, temperatures, entropy=True, top=top, chunk_logits=chunk_tokens * VOCAB
    )
    scores = (head(hidden) / temperatures[:, None]).log_softmax(-1)
    expected = (*plain(hidden, head, targets, temperatures), plain_forward_kl(scores, top))
    inputs, weights = [hidden, *head.parameters()], torch.arange(TOKENS)
    gradients = [torch.autograd.grad(((x[0] - 3 * x[2]) * weights).sum(), inputs) for x in (got, expected)]
    for mine, theirs in zip((*got, *gradients[0]), (*expected, *gradients[1]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_the_forward_kl_worked_by_hand() -> None:
    """p = (1/2, 1/4 | 1/4), q = (1/4, 1/4 | 1/2): 1/2 log 2 + 0 - 1/4 log 2."""
    weight = torch.tensor([[1.0], [1.0], [0.5], [0.5], [1.0]]).log()  # q = 1/4, 1/4, 1/8, 1/8, 1/4
    top = TopTokens(ids=torch.tensor([[0, 4]]), logprobs=torch.tensor([[0.5, 0.25]]).log())
    got = score_tokens(torch.ones(1, 1), weight, None, torch.tensor([2]), None, entropy=False, top=top)
    assert got[2].tolist() == pytest.approx([0.25 * math.log(2)], abs=1e-6)
    assert got[0].tolist() == pytest.approx([math.log(1 / 8)], abs=1e-6), "the sampled token is none of the top two"


def test_a_policy_that_leaves_nothing_to_the_others_is_still_pulled_to_them() -> None:
    logits = torch.tensor([[300.0], [0.0], [0.0]], requires_grad=True)  # in float32 q of the others is 0
    top = TopTokens(ids=torch.tensor([[0]]), logprobs=torch.tensor([[0.5]]).log())
    got = score_tokens(torch.ones(1, 1), logits, None, torch.tensor([0]), None, entropy=True, top=top)
    got[2].sum().backward()
    assert got[2].tolist() == pytest.approx([-math.log(2) + 0.5 * (300 - math.log(2))], rel=1e-6)
    assert logits.grad is not None and logits.grad.flatten().tolist() == pytest.approx([0.5, -0.25, -0.25])


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


@pytest.mark.parametrize("head", ["trained", "frozen", "capped", "half of the tokens truncated", "taught"])
def test_no_pass_over_a_large_vocabulary_holds_more_than_one_chunk_of_logits(head: str) -> None:
    tokens, width, chunk_logits = 60, 16, 1 << 21
    weight = torch.randn(LARGE_VOCAB, width, requires_grad=head != "frozen")
    hidden, targets = torch.randn(tokens, width, requires_grad=True), torch.arange(tokens)
    temperatures, own = torch.full((tokens,), 0.7), capped if head == "capped" else None
    ids = torch.arange(4).expand(tokens, -1)
    top = TopTokens(ids=ids, logprobs=torch.full((tokens, 4), -2.0)) if head == "taught" else None
    kept = torch.arange(0, tokens, 2).expand(2, -1) if "truncated" in head else None  # each its own token alone

    def score() -> Tensor:
        columns, options = (targets, temperatures, kept), {"own_logits": own, "chunk_logits": chunk_logits, "top": top}
        scores = score_tokens(hidden, weight, None, *columns, entropy=True, **options)
        return scores[0] if top is None else scores[0] + scores[2]

    def score_without_gradient() -> None:
        with torch.no_grad():
            score()

    logits, chunk = 4 * tokens * LARGE_VOCAB, 4 * chunk_logits
    gradient = weight.nbytes if weight.requires_grad else 0
    of_cap = {"scores": 3 * chunk, "gradient": 6 * chunk}  # its steps are tensors of their own
    # The sum over the others has the exponentials of a chunk beside it.
    most = of_cap if own else dict.fromkeys(of_cap, 2 * chunk if top else chunk)
    found = {"scores": peak_bytes(score_without_gradient), "gradient": peak_bytes(lambda: score().sum().backward())}
    assert logits > 4 * chunk and found["gradient"] >= 0.9 * chunk + gradient
    assert found["scores"] <= most["scores"] + (1 << 20)
    assert found["gradient"] <= most["gradient"] + gradient + (1 << 20)


def capped(hidden: Tensor, linear: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.tanh(linear(hidden) / 30) * 30
