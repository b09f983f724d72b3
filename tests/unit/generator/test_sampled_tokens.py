"""Tokens of every slot, whatever steps it took part in."""

from __future__ import annotations

import numpy as np

from rollmesh.generator.engines.torch.slots import CAPACITY, SampledTokens

SLOTS = 5


def test_every_slot_has_the_tokens_of_the_steps_in_which_it_had_a_row():
    rng = np.random.default_rng(0)
    sampled = SampledTokens(SLOTS)
    known: list[list[tuple[int, float]]] = [[] for _ in range(SLOTS)]
    delivered = [0] * SLOTS
    for _ in range(200):
        rows = rng.permutation(SLOTS)[: rng.integers(1, SLOTS + 1)]
        sampled.arrange(rows)
        for _ in range(rng.integers(0, 40)):
            tokens, logprobs = rng.integers(0, 1000, len(rows)), rng.random(len(rows), np.float32)
            sampled.append(tokens, logprobs)
            for slot, token, logprob in zip(rows, tokens, logprobs, strict=True):
                known[slot].append((token, logprob))
        slots = rng.permutation(SLOTS)
        assert sampled.counts(slots).tolist() == [len(known[slot]) for slot in slots]
        slot = int(slots[0])
        if rng.random() < 0.1:
            sampled.reset(slot)
            known[slot], delivered[slot] = [], 0
        start = max(delivered[slot], len(known[slot]) - CAPACITY)
        token_ids, logprobs = sampled.since(slot, start)
        assert list(zip(token_ids, logprobs, strict=True)) == known[slot][start:]
        delivered[slot] = len(known[slot])


def test_a_step_that_is_not_read_yet_counts_for_the_slots_that_had_its_rows():
    sampled = SampledTokens(SLOTS)
    sampled.arrange(np.array([3, 1]))
    sampled.append(np.array([30, 10]), np.zeros(2, np.float32))
    sampled.arrange(np.array([1]))
    sampled.append(np.array([11]), np.zeros(1, np.float32))
    sampled.reset(3)
    assert [sampled.since(slot, 0)[0].tolist() for slot in range(SLOTS)] == [[], [10, 11], [], [], []]
