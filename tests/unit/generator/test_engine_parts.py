"""Parts of the engines that decide and keep: cache, sampled tokens, admission, products, unsaved tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.generator.engines.call_limits import Backlog
from rollmesh.generator.engines.torch.architecture import Architecture, Rope
from rollmesh.generator.engines.torch.decoder_model import prefill_batches
from rollmesh.generator.engines.torch.drafts import COMPARED
from rollmesh.generator.engines.torch.kernels import NumpyMultiply, TorchMultiply, fastest_multiply
from rollmesh.generator.engines.torch.kv_cache import KvCache, tier_widths
from rollmesh.generator.engines.torch.model_thread import peak_tokens, remaining_estimate
from rollmesh.generator.engines.torch.slots import CAPACITY, SampledTokens

from ...kit.generation import make_call

ARCH = Architecture(
    family="qwen2",
    vocab_size=11,
    hidden_size=8,
    layer_count=2,
    head_count=4,
    kv_head_count=2,
    head_size=2,
    mlp_size=8,
    norm_eps=1e-6,
    rope=Rope(theta=1e4),
    max_positions=512,
    qkv_bias=True,
    output_bias=False,
    qk_norm=False,
    tied_head=True,
)


def make_cache(token_capacity: int, longest: int = 300) -> KvCache:
    widths = tier_widths(min(longest, token_capacity), first=64)
    return KvCache(ARCH, token_capacity=token_capacity, widths=widths, dtype=torch.float32, device=torch.device("cpu"))


def test_widths_double_up_to_the_longest_context():
    assert tier_widths(4352, first=256) == (256, 512, 1024, 2048, 4352)
    assert tier_widths(5500, first=256) == (256, 512, 1024, 2048, 4096, 5500)
    assert tier_widths(300, first=128) == (128, 300)
    assert tier_widths(20, first=128) == (20,)


@settings(max_examples=50)
@given(st.data())
def test_rows_keep_their_tokens_through_adds_removals_promotions_and_growth(data):
    cache = make_cache(token_capacity=1500)
    content: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    kept: list[tuple[np.ndarray, tuple[torch.Tensor, torch.Tensor]]] = []
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["add", "add", "remove", "keep", "promote"]))
        if action == "add":
            length = data.draw(st.integers(0, 299))
            slot = next(i for i in range(100) if i not in content)
            if cache.has_room([cache.width_for(length)]):
                keys, values = torch.randn(2, 2, 2, length), torch.randn(2, 2, length, 2)
                cache.add(slot, length)
                cache.write(slot, keys, values)
                content[slot] = keys, values
        elif action in ("remove", "keep") and content:
            slot = data.draw(st.sampled_from(sorted(content)))
            if action == "keep" and content[slot][1].shape[2]:
                ids = np.full(content[slot][1].shape[2], len(kept), np.int32)
                cache.keep(slot, 0, ids)
                kept.append((ids, content[slot]))
            cache.remove(slot)
            del content[slot]
        elif action == "promote":
            used = [t for t in cache.tiers[:-1] if t.slots]
            if used:
                tier = data.draw(st.sampled_from(used))
                slots = data.draw(st.lists(st.sampled_from(tier.slots), min_size=1, unique=True))
                if cache.has_room([cache.next_width(slots[0]) - tier.width] * len(slots)):
                    cache.promote(tier, slots)
        assert cache.reserved <= cache.allocated <= cache.token_capacity
        check_kept(cache, kept)
        assert sorted(s for t in cache.tiers for s in t.slots) == sorted(content)
        for slot, (keys, values) in content.items():
            found_keys, found_values = cache.read(slot, values.shape[2])
            assert torch.equal(found_keys, keys) and torch.equal(found_values, values)


def check_kept(cache, kept):
    """What is found of the kept tokens is as it was, and fits beside the rows."""
    found = [(prefix, content) for ids, content in kept if (prefix := cache.prefixes.longest(0, ids)[0])]
    assert sum(len(prefix.token_ids) for prefix, _ in found) == cache.prefixes.kept_tokens
    assert cache.reserved + cache.prefixes.kept_tokens <= cache.token_capacity
    for prefix, content in found:
        assert all(map(torch.equal, cache.read_prefix(prefix, len(prefix.token_ids)), content))


def test_blocks_give_unused_rows_back_before_the_capacity_is_exceeded():
    cache = make_cache(token_capacity=600)
    for slot in range(9):
        cache.add(slot, 10)
    for slot in range(9):
        cache.remove(slot)
    cache.add(0, 250)
    cache.add(1, 250)
    assert cache.allocated <= 600
    assert not cache.has_room([64])


@pytest.mark.parametrize("length", [0, 63, 64, 299])
def test_a_row_always_has_room_for_the_next_token(length):
    assert make_cache(token_capacity=600).width_for(length) > length


SLOTS = 5


def test_every_slot_has_the_tokens_of_the_steps_in_which_it_had_a_row():
    rng = np.random.default_rng(0)
    sampled = SampledTokens(SLOTS)
    known: list[list[tuple[int, float]]] = [[] for _ in range(SLOTS)]
    delivered = [0] * SLOTS
    contexts: list[list[int]] = [[] for _ in range(SLOTS)]
    for _ in range(200):
        rows = rng.permutation(SLOTS)[: rng.integers(1, SLOTS + 1)]
        sampled.arrange(rows)
        for _ in range(rng.integers(0, 40)):
            tokens, logprobs = rng.integers(0, 1000, len(rows)), rng.random(len(rows), np.float32)
            sampled.append(tokens, logprobs)
            for slot, token, logprob in zip(rows, tokens, logprobs, strict=True):
                known[slot].append((token, logprob))
            if rng.random() < 0.3:  # a wide step, of whose tokens the first few are kept
                shape = len(rows), int(rng.integers(2, 17))
                wide, chances, counts = (
                    rng.integers(0, 1000, shape),
                    rng.random(shape, np.float32),
                    rng.integers(1, 3, shape[0]),
                )
                sampled.append_uneven(counts, wide, chances)
                for row, slot in enumerate(rows):
                    known[slot] += list(zip(wide[row], chances[row], strict=True))[: counts[row]]
        slots = rng.permutation(SLOTS)
        assert sampled.counts(slots).tolist() == [len(known[slot]) for slot in slots]
        slot = int(slots[0])
        if rng.random() < 0.1:
            before = rng.integers(1, 1000, rng.integers(0, COMPARED + 1)).astype(np.int32)
            sampled.reset(slot, before)
            known[slot], delivered[slot], contexts[slot] = [], 0, before.tolist()
        said = [0] * COMPARED + contexts[slot] + [token for token, _ in known[slot]]
        assert np.frombuffer(sampled.newest(slot), np.int32).tolist() == said[-COMPARED:]
        start = max(delivered[slot], len(known[slot]) - CAPACITY)  # wide steps write over none of these
        token_ids, logprobs = sampled.since(slot, start)
        assert list(zip(token_ids, logprobs, strict=True)) == known[slot][start:]
        delivered[slot] = len(known[slot])


lengths = st.lists(st.tuples(st.integers(1, 200), st.integers(1, 200)), min_size=1, max_size=12)


@given(lengths)
def test_the_peak_is_what_a_step_by_step_simulation_finds(calls):
    length, remaining = (np.array(x, np.int64) for x in zip(*calls, strict=True))
    peak = 0
    for step in range(int(remaining.max()) + 1):
        alive = remaining >= step
        peak = max(peak, int((length[alive] + step).sum()))
    assert peak_tokens(length, remaining) == peak


def test_nothing_running_has_no_peak():
    assert peak_tokens(np.empty(0, np.int64), np.empty(0, np.int64)) == 0


def test_estimates_use_longer_responses_only_and_never_exceed_the_budget():
    history = np.array([10, 20, 30, 40, 1000])
    estimate = remaining_estimate(np.array([0, 35, 2000, 0]), np.array([500, 500, 70, 12]), history)
    assert estimate.tolist() == [40, 5, 70, 12]
    assert remaining_estimate(np.array([3]), np.array([9]), np.empty(0, np.int64)).tolist() == [9]


@given(st.lists(st.integers(1, 300), max_size=30), st.integers(1, 400))
def test_prefill_batches_cover_everything_once_within_the_budget(counts, budget):
    batches = prefill_batches(counts, budget)
    assert sorted(i for b in batches for i in b) == list(range(len(counts)))
    for batch in batches:
        widths = [counts[i] for i in batch]
        assert widths == sorted(widths, reverse=True)
        assert len(batch) == 1 or len(batch) * widths[0] <= budget


def test_numpy_is_no_candidate_where_its_threads_differ_from_torch_s(monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "7")
    assert isinstance(fastest_multiply(torch.ones(32, 64), 16), TorchMultiply)
    monkeypatch.delenv("OPENBLAS_NUM_THREADS")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert isinstance(fastest_multiply(torch.ones(32, 64), 16), TorchMultiply)


def test_numpy_is_no_candidate_for_bfloat16(monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    assert isinstance(fastest_multiply(torch.ones(32, 64, dtype=torch.bfloat16), 16), TorchMultiply)


@pytest.mark.parametrize("multiply", [TorchMultiply(), NumpyMultiply()])
def test_products_are_written_into_the_memory_of_the_output_tensor(multiply):
    a, b = torch.randn(5, 3, 4), torch.randn(5, 7, 4).transpose(1, 2)
    batched, single = torch.empty(5, 3, 7), torch.empty(3, 7)
    op = multiply.operand
    multiply(op(a), op(b), op(batched))
    multiply(op(a[0]), op(b[0]), op(single))
    torch.testing.assert_close(batched, a @ b)
    torch.testing.assert_close(single, a[0] @ b[0])


def backlog(context: int = 10, chunk: int = 4, limit: int = 8) -> Backlog:
    limits = {"max_new_token_count": 1000, "chunk_token_count": chunk, "unacknowledged_token_limit": limit}
    return Backlog.of(make_call("t", np.zeros(context, np.int32), **limits))


@given(
    chunk=st.integers(1, 8),
    spare=st.integers(0, 16),
    steps=st.lists(
        st.one_of(st.integers(1, 8).map(lambda n: ("chunk", n)), st.integers(0, 60).map(lambda n: ("ack", n)))
    ),
)
def test_no_chunk_begins_that_could_take_a_call_beyond_its_limit(
    chunk: int, spare: int, steps: list[tuple[str, int]]
) -> None:
    limit = chunk + spare
    call = backlog(chunk=chunk, limit=limit)
    sampled = durable = 10
    for kind, count in steps:
        if kind == "ack":
            call.acknowledge(count)
            durable = max(durable, min(count, sampled))
        elif not call.blocked:
            call.add(min(count, chunk))
            sampled += min(count, chunk)
        assert sampled - durable <= limit
        assert call.blocked is (sampled - durable + chunk > limit)


def test_a_call_without_a_limit_is_never_blocked() -> None:
    call = backlog(limit=0)
    call.add(4000)
    assert not call.blocked


def test_a_late_report_about_an_earlier_call_does_not_vouch_for_tokens_of_this_one() -> None:
    call = backlog(context=14)
    call.acknowledge(40)
    call.add(4)
    call.acknowledge(12)
    assert not call.blocked
    call.add(4)
    assert call.blocked
