"""The tiered key-value cache: rows keep their content whatever moves around them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.generator.engines.torch.architecture import Architecture, Rope
from rollmesh.generator.engines.torch.kv_cache import KvCache, tier_widths

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
    return KvCache(
        ARCH, token_capacity=token_capacity, longest=longest, dtype=torch.float32, device=torch.device("cpu")
    )


def test_widths_grow_by_half_up_to_the_longest_context():
    assert tier_widths(300) == (64, 96, 144, 224, 300)
    assert tier_widths(64) == (64,)
    assert tier_widths(20) == (20,)


@settings(max_examples=50)
@given(st.data())
def test_rows_keep_their_tokens_through_adds_removals_promotions_and_growth(data):
    cache = make_cache(token_capacity=1500)
    content: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["add", "add", "remove", "promote"]))
        if action == "add":
            length = data.draw(st.integers(0, 299))
            slot = next(i for i in range(100) if i not in content)
            if cache.has_room([cache.width_for(length)]):
                keys, values = torch.randn(2, 2, 2, length), torch.randn(2, 2, length, 2)
                cache.add(slot, length)
                cache.write(slot, keys, values)
                content[slot] = keys, values
        elif action == "remove" and content:
            slot = data.draw(st.sampled_from(sorted(content)))
            cache.remove(slot)
            del content[slot]
        elif action == "promote":
            used = [t for t in cache.tiers[:-1] if t.slots]
            if used:
                tier = data.draw(st.sampled_from(used))
                slots = data.draw(st.lists(st.sampled_from(tier.slots), min_size=1, unique=True))
                if cache.has_room([cache.next_width(slots[0]) - tier.width] * len(slots)):
                    cache.promote(tier, slots)
        assert cache.reserved <= cache.allocated
        assert sorted(s for t in cache.tiers for s in t.slots) == sorted(content)
        for slot, (keys, values) in content.items():
            found_keys, found_values = cache.read(slot, values.shape[2])
            assert torch.equal(found_keys, keys) and torch.equal(found_values, values)
        for tier in cache.tiers:
            valid = (tier.mask[tier.rows(0, len(tier.slots))] == 0).sum((1, 2)).tolist()
            assert valid == [content[slot][1].shape[2] for slot in tier.slots for _ in range(ARCH.kv_head_count)]


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


def test_a_wider_row_than_the_capacity_is_never_offered():
    assert make_cache(token_capacity=200).longest == 200


@pytest.mark.parametrize("length", [0, 63, 64, 299])
def test_a_row_always_has_room_for_the_next_token(length):
    assert make_cache(token_capacity=600).width_for(length) > length
