"""Training on truncated sampling: every log-probability is over the kept set of its token."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM

from rollmesh.kept_sets import choose_sets, pair_sets, slice_sets
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.trainer.learner.token_scores import CHUNK_LOGITS, score_tokens
from rollmesh.types import SegmentSource, Trajectory

from ....kit.made_batches import VOCAB, batch_of, policy_segment, random_batch, sets_of, trajectory, with_kept_sets
from .conftest import VERSIONS, ModelMaker, make_trainer

SETS = st.lists(st.sets(st.integers(0, VOCAB - 1), max_size=VOCAB).map(sorted), min_size=1, max_size=12)


def by_loop(logits: torch.Tensor, temperature: float, kept: list[int], target: int) -> tuple[torch.Tensor, float]:
    """Log-probability and entropy of one token over its set, term by term in float64."""
    terms = [torch.exp(logits[token].double() / temperature) for token in kept or range(VOCAB)]
    total = sum(terms[1:], terms[0])
    shares = [float((term / total).detach()) for term in terms]
    return logits[target].double() / temperature - total.log(), -sum(p * math.log(p) for p in shares if p)


@given(SETS, st.data())
def test_pairs_are_those_of_the_chosen_tokens(lists: list[list[int]], data: st.DataObject) -> None:
    sets = sets_of(lists)
    index = np.array(data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=9)), np.int64)
    pairs = pair_sets(sets, index)
    wanted = [(place, token) for place, at in enumerate(index) for token in lists[at]]
    assert wanted == ([] if pairs is None else list(map(tuple, pairs.T.tolist())))
    chosen = np.isin(np.arange(len(lists)), index)
    part = choose_sets(sets, chosen)
    assert part is not None and part.counts.tolist() == [len(s) for s, c in zip(lists, chosen, strict=True) if c]
    assert part.ids.tolist() == [token for s, c in zip(lists, chosen, strict=True) if c for token in s]


@settings(max_examples=30)
@given(SETS, st.booleans(), st.booleans(), st.booleans(), st.data())
def test_scores_and_gradients_over_kept_sets_are_those_of_a_loop(
    lists: list[list[int]], tempered: bool, narrow: bool, chunked: bool, data: st.DataObject
) -> None:
    if narrow:  # every token has a set: only the rows of the head that occur are computed
        lists = [kept or [data.draw(st.integers(0, VOCAB - 1))] for kept in lists]
    torch.manual_seed(len(lists))
    count = len(lists)
    head, hidden = nn.Linear(8, VOCAB).double(), torch.randn(count, 8, dtype=torch.float64, requires_grad=True)
    targets = [data.draw(st.sampled_from(kept or range(VOCAB))) for kept in lists]
    temperatures = torch.rand(count) + 0.5 if tempered else None
    pairs = pair_sets(sets_of(lists), np.arange(count))
    logprobs, entropy = score_tokens(
        hidden,
        head.weight,
        head.bias,
        torch.tensor(targets),
        temperatures,
        None if pairs is None else torch.from_numpy(pairs),
        entropy=True,
        chunk_logits=3 * VOCAB if chunked else CHUNK_LOGITS,
    )
    weights = torch.arange(count) - 1.5
    values = [hidden, *head.parameters()]
    gradients = torch.autograd.grad((logprobs * weights).sum(), values)
    logits = head(hidden)
    wanted = [
        by_loop(logits[row], 1.0 if temperatures is None else float(temperatures[row]), lists[row], targets[row])
        for row in range(count)
    ]
    loss = sum((weights[row] * wanted[row][0] for row in range(count)), torch.zeros((), dtype=torch.float64))
    for got, want in zip(gradients, torch.autograd.grad(loss, values), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logprobs, torch.stack([w[0] for w in wanted]), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        entropy, torch.tensor([w[1] for w in wanted], dtype=torch.float64), rtol=1e-12, atol=1e-12
    )


def test_a_token_of_full_sampling_has_the_same_bits_beside_truncated_ones() -> None:
    torch.manual_seed(0)
    head, hidden = nn.Linear(8, VOCAB), torch.randn(9, 8, requires_grad=True)
    targets, temperatures = torch.arange(9), torch.rand(9) + 0.5
    kept = torch.stack((torch.arange(0, 9, 2).repeat_interleave(2), torch.tensor([0, 39, 2, 39, 4, 39, 6, 39, 8, 39])))
    results = []
    for sets in (None, kept):
        logprobs, entropy = score_tokens(hidden, head.weight, head.bias, targets, temperatures, sets, entropy=True)
        results.append((logprobs[1::2], entropy[1::2], torch.autograd.grad(logprobs[1::2].sum(), hidden)[0][1::2]))
    for whole, mixed in zip(*results, strict=True):
        assert torch.equal(whole, mixed)


def scores_of(folder: Path, member: Trajectory) -> dict[int, tuple[float, float]]:
    """Log-probability and entropy of every sampled token of a response, by its position; transformers and loops."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    ids = [*member.prompt.token_ids.tolist(), *member.response_ids.tolist()]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0]
    scores, position = {}, 0
    for segment in member.segments:
        for k in range(len(segment)):
            if segment.source is SegmentSource.POLICY:
                kept = [] if segment.kept_sets is None else slice_sets(segment.kept_sets, k, k + 1).ids.tolist()
                at = len(member.prompt.token_ids) + position
                logprob, entropy = by_loop(logits[at - 1], segment.temperature, kept, ids[at])
                scores[position] = float(logprob), entropy
            position += 1
    return scores


BATCH = replace(with_kept_sets(random_batch(5, groups=2), 5, full=0.2), train_step=2)
MEMBERS = {t.trajectory_id: t for group in BATCH.groups for t in group.trajectories}


def trained_once(folder: Path, out: Path, **algorithm: object) -> PolicyTrainer:
    """A trainer after one step, whose first stage has recorded ``BATCH``; its weights are exported to ``out``."""
    trainer = make_trainer(folder, exact=True, kept={0: folder}, algorithm=algorithm)
    unfinished = [replace(t, finish_reason=None) for t in MEMBERS.values()]
    trainer.end_stage(unfinished, VERSIONS)
    rng = np.random.default_rng(0)
    short = [trajectory(f"s.{m}", [policy_segment(rng, 6)], float(m)) for m in (0, 1)]
    trainer.train(batch_of(short), VERSIONS)
    trainer.export(out)
    return trainer


@pytest.mark.parametrize("source", ["sampler", "current", "recompute", "snapshot", "stage_end"])
def test_old_logprobs_of_every_source_are_over_the_kept_sets(
    make_model: ModelMaker, tmp_path: Path, source: str
) -> None:
    first = make_model("qwen2")
    trainer = trained_once(first, tmp_path, old_logprobs=source)
    now, then = ({i: scores_of(folder, t) for i, t in MEMBERS.items()} for folder in (tmp_path, first))
    old = then if source in ("snapshot", "stage_end") else now
    explained = [token for token in trainer.explain(BATCH, VERSIONS) if token.policy_version is not None]
    assert len(explained) == sum(map(len, now.values()))
    for token in explained:
        assert token.logprob == pytest.approx(now[token.trajectory_id][token.position][0], abs=1e-6)
        wanted = old[token.trajectory_id][token.position][0] if source != "sampler" else token.behavior_logprob
        assert token.old_logprob == pytest.approx(wanted, abs=1e-6) and not token.old_logprob_fallback


def test_entropy_and_the_kl_to_a_reference_are_over_the_kept_sets(make_model: ModelMaker, tmp_path: Path) -> None:
    first = make_model("qwen2")
    trainer = trained_once(first, tmp_path, kl_coefficient=0.1, kl_reference_version=0)
    report = trainer.train(BATCH, VERSIONS)
    now, then = ([s for t in MEMBERS.values() for s in scores_of(folder, t).values()] for folder in (tmp_path, first))
    differences = [q - p for (p, _), (q, _) in zip(now, then, strict=True)]
    kl = sum(math.exp(d) - 1 - d for d in differences) / len(now)
    assert kl > 1e-4 and report.policy.kl_reference == pytest.approx(kl, rel=1e-5)
    assert report.policy.entropy == pytest.approx(sum(entropy for _, entropy in now) / len(now), rel=1e-6)
