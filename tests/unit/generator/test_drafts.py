"""Drafts from history: what is found, what is forgotten, and what it costs."""

import time

import numpy as np
import pytest

from rollmesh.generator.engines.torch.drafts import COMPARED, PATTERN, Drafts

_MOST = 10_000_000


def filled(most: int, responses: list[tuple[int, np.ndarray]]) -> Drafts:
    drafts = Drafts(most)
    for key, ids in responses:
        drafts.add(key, np.full(6, 900 + key, np.int32), ids)
    return drafts


def recent(*parts: np.ndarray) -> bytes:
    """The last tokens of a call, as an engine gives them."""
    ids = np.concatenate([np.zeros(COMPARED, np.int32), *parts]).astype(np.int32)
    return ids[-COMPARED:].tobytes()


def test_a_draft_continues_the_longest_match_with_the_last_tokens_as_a_loop_over_all_responses_finds_it() -> None:
    rng = np.random.default_rng(0)
    responses = [(int(rng.integers(3)), rng.integers(0, 9, int(rng.integers(1, 60)))) for _ in range(80)]
    drafts, found = filled(100_000, [(key, ids.astype(np.int32)) for key, ids in responses]), 0
    for _ in range(600):
        key, (_, ids) = int(rng.integers(3)), responses[int(rng.integers(len(responses)))]
        cut = int(rng.integers(0, len(ids) + 1))
        last = np.concatenate((rng.integers(0, 9, COMPARED), ids[:cut]))[-COMPARED:]
        longest = 0
        for other, response in responses:
            known = [900 + key] * PATTERN + response.tolist() if other == key else []
            for place in range(PATTERN, len(known)):
                length = 0
                while length < min(place, COMPARED) and known[place - 1 - length] == last[-1 - length]:
                    length += 1
                longest = max(longest, length if length >= PATTERN else 0)
        match = drafts.find(key, last.astype(np.int32).tobytes())
        assert (0 if match is None else match.length) == longest
        found += longest > 0
    assert 100 < found < 600


def test_the_newest_of_equal_matches_is_drafted_up_to_the_end_of_its_response() -> None:
    begin = np.arange(10, 16, dtype=np.int32)
    older, newer = (np.append(begin, np.int32(end)) for end in (20, 30))
    drafts = filled(1000, [(1, older), (1, newer), (2, np.append(begin, np.int32(40)))])
    for key, end in ((1, 30), (2, 40)):
        match = drafts.find(key, recent(begin[:4]))
        assert match is not None and match.length == PATTERN
        assert drafts.tokens(match.start, 3).tolist() == [14, 15, end] and drafts.tokens(match.start, 4)[3] < 0
    assert drafts.find(3, recent(begin)) is None
    assert drafts.find(1, recent(begin[:3])) is None, "three tokens are too few"


def test_the_first_tokens_of_a_call_are_drafted_from_the_end_of_its_prompt() -> None:
    drafts = filled(1000, [(1, np.array([7, 8], np.int32))])
    match = drafts.find(1, recent(np.full(6, 901)))
    assert match is not None and drafts.tokens(match.start, 2).tolist() == [7, 8]


def test_the_oldest_responses_make_room_and_one_that_is_too_long_is_left_out() -> None:
    rng, most = np.random.default_rng(1), 300_000
    drafts = Drafts(most)
    responses = [rng.integers(0, 30_000, 1000).astype(np.int32) for _ in range(700)]
    for key, ids in enumerate(responses):
        drafts.add(key, ids[:8], ids)
    drafts.add(9999, responses[0], rng.integers(0, 9, most).astype(np.int32))
    known = [drafts.find(key, recent(ids[:500])) is not None for key, ids in enumerate(responses)]
    assert known.index(True) > 350 and sum(known) > 250 and all(known[-250:])
    assert drafts.find(9999, recent(responses[0])) is None
    drafts.clear()
    assert not any(drafts.find(key, recent(ids[:500])) for key, ids in enumerate(responses))


@pytest.mark.long
def test_ten_million_tokens_take_at_most_24_bytes_each_and_a_look_up_five_microseconds() -> None:
    """Its seconds are CPU seconds, the best of five rounds: other programs only add to them."""
    rng, drafts, prompts = np.random.default_rng(2), Drafts(_MOST), []
    for key in range(1240):
        ids = rng.integers(0, 30_000, 1000).astype(np.int32)
        prompts.append(ids)
        for sibling in range(8):
            drafts.add(key, ids[:9], np.concatenate((ids[:500], ids[500:] + sibling)).astype(np.int32))
    assert drafts.bytes_used <= 24 * _MOST
    asked = [(key, recent(ids[: int(rng.integers(4, 500))])) for key, ids in enumerate(prompts) if key > 100]
    drafts.find(*asked[0])
    taken = []
    for _ in range(5):
        started = time.process_time()
        found = [drafts.find(key, last) for key, last in asked]
        taken.append((time.process_time() - started) / len(asked))
        assert all(found)
    assert min(taken) <= 5e-6
