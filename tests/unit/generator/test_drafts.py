"""Drafts from history: what is found and forgotten, what it costs, how long the next one is, and when they pause."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollmesh.generator.engines.torch.drafts import COMPARED, PATTERN, Drafts
from rollmesh.generator.engines.torch.speculation import Proposal, Speculation, next_length

from ...kit.generation import make_call

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


def test_ten_million_tokens_take_at_most_24_bytes_each() -> None:
    rng, drafts, prompts = np.random.default_rng(2), Drafts(_MOST), []
    for key in range(1240):
        ids = rng.integers(0, 30_000, 1000).astype(np.int32)
        prompts.append(ids)
        for sibling in range(8):
            drafts.add(key, ids[:9], np.concatenate((ids[:500], ids[500:] + sibling)).astype(np.int32))
    assert all(drafts.find(key, recent(ids[: int(rng.integers(4, 500))])) for key, ids in enumerate(prompts))
    assert drafts.bytes_used <= 24 * _MOST


def test_a_draft_doubles_up_to_16_while_it_is_accepted_and_halves_on_a_miss():
    lengths = [2]
    for accepted in (2, 4, 8, 16, 16, 3, 8, 0, 2, 1, 0):
        lengths.append(next_length(lengths[-1], 16, accepted))
    assert lengths == [2, 4, 8, 16, 16, 16, 8, 16, 8, 4, 2, 2]


def test_a_draft_that_was_cut_is_whole_if_all_that_was_left_is_accepted():
    assert next_length(8, 3, 3) == 16
    assert next_length(8, 3, 2) == 4
    assert next_length(4, 7, 4) == 8  # more than its length, in a wider step
    assert next_length(4, 7, 3) == 2


@pytest.mark.parametrize(
    ("sampled", "kept"),
    [([5, 6, 7, 8], 4), ([5, 6, 9, 8], 3), ([9, 6, 7, 8], 1)],
    ids=["all, and one more", "until the third differs", "the first only"],
)
def test_tokens_are_kept_until_one_is_not_the_drafts(sampled, kept):
    proposal = Proposal([[], [5, 6, 7]], width=4)
    assert proposal.kept([[5, 6, 7, 1], sampled]) == [1, kept]
    assert proposal.inputs([3, 4]) == [3, 0, 0, 0, 4, 5, 6, 7]


def ended(engine: Speculation, name: int, length: int) -> None:
    """A response of ``length`` tokens to the prompt ``name``."""
    engine.remember(running(name).request.context_ids, np.zeros(length, np.int32))


def running(name: int) -> Any:
    return SimpleNamespace(slot=0, request=make_call(f"t{name}", np.full(6, name, np.int32)))


def test_prompts_with_responses_below_a_quarter_of_the_mean_draft_nothing():
    engine = Speculation(32, 256)
    for name, length in enumerate((10, 30, 80)):  # mean 40
        ended(engine, name, length)
    shorts = []
    for name in (0, 1, 2, 3):
        engine.begin(running(name))
        shorts.append(engine._courses[0].is_short)
    assert shorts == [False] * 4  # 10 is a quarter of 40, the fourth prompt is new
    ended(engine, 1, 46)  # 30 + (46 - 30) / 4 = 34; mean (10 + 34 + 80) / 3 = 41.3
    engine.begin(running(0))
    assert engine._courses[0].is_short


def steps_of(
    engine: Speculation,
    rows: int,
    seconds: float,
    tokens: int,
    steps: int,
    *,
    plain: float = 1.0,
    new_plan: bool = False,
) -> str:
    """Return ``d`` for each step with drafts, which takes ``seconds``, and ``.`` for each other, of ``plain`` ones."""
    found = ""
    for _ in range(steps):
        rests = engine.begin_step(rows)
        drafting = not rests and engine.drafts_with(rows)
        if not rests:
            taken = seconds if drafting else plain
            engine.measure(rows, rows * tokens if drafting else rows, taken, new_plan=new_plan and drafting)
        else:
            engine.rested(rows, 1)
        found += "d" if drafting else "."
    return found


def test_trials_that_do_not_pay_are_followed_by_longer_rests_and_the_next_trial():
    found = steps_of(Speculation(32, 256), rows=1, seconds=1.2, tokens=1, steps=24_000)
    rests = [len(rest) for rest in found.split("d") if len(rest) > 17]
    # 17 plain steps come before a trial, and 5 behind it.
    assert rests[:5] == [5 + rest + 17 for rest in (64, 256, 1024, 4096, 4096)]
    assert max(map(len, found.split("."))) == 32


def test_drafts_that_pay_do_not_rest_and_plain_steps_are_measured_between_them():
    found = steps_of(Speculation(32, 256), rows=1, seconds=1.5, tokens=2, steps=4000)
    assert found == ("." * 17 + "d" * 32 + "." * 5 + ("d" * 128 + "." * 5) * 30)[:4000]


def test_a_machine_that_slows_down_does_not_end_drafts_that_pay():
    """Steps with drafts look twice as slow beside the plain ones before them, and not beside those after them."""
    engine = Speculation(32, 256)
    found = "".join(
        steps_of(engine, rows=1, seconds=1.5 * slower, tokens=2, steps=40, plain=slower) for slower in (1, 2) * 20
    )
    assert max(map(len, found.split("d"))) == 17 and found.count("d") > 0.7 * len(found)


def test_one_very_slow_step_ends_no_drafts_that_pay():
    engine = Speculation(32, 256)
    steps_of(engine, rows=1, seconds=1.5, tokens=2, steps=500)
    slow = steps_of(engine, rows=1, seconds=500.0, tokens=2, plain=500.0, steps=1)
    assert max(map(len, (slow + steps_of(engine, rows=1, seconds=1.5, tokens=2, steps=500)).split("d"))) == 5


def test_useless_drafts_rest_though_fewer_and_fewer_calls_are_running():
    """A step of fewer calls takes as long: drafts have not saved what calls that have ended take no longer."""
    engine = Speculation(32, 256)
    found = "".join(steps_of(engine, rows=rows, seconds=1.1, tokens=1, steps=20) for rows in range(64, 32, -1))
    assert found.count("d") == 3 * 32  # three trials


def test_drafts_that_have_saved_much_rest_for_a_short_time_first():
    engine = Speculation(32, 256)
    steps_of(engine, rows=1, seconds=1.2, tokens=1, steps=2000)  # the next rest has 4096 steps
    steps_of(engine, rows=1, seconds=1.5, tokens=2, steps=5000)
    found = steps_of(engine, rows=1, seconds=1.5, tokens=1, steps=400)
    assert 64 + 17 in {len(rest) - 5 for rest in found.split("d")}


def test_drafts_that_no_longer_pay_rest_soon():
    engine = Speculation(32, 256)
    steps_of(engine, rows=1, seconds=1.5, tokens=2, steps=1000)
    assert "." * 64 in steps_of(engine, rows=1, seconds=1.5, tokens=1, steps=220)


def test_useless_drafts_cost_less_than_two_percent_of_the_steps():
    assert 0 < steps_of(Speculation(32, 256), rows=1, seconds=1.5, tokens=1, steps=8000).count("d") < 0.02 * 8000


def test_drafts_that_do_not_pay_rest_with_more_calls_and_not_with_fewer():
    engine = Speculation(32, 256)
    steps_of(engine, rows=4, seconds=3.0, tokens=2, steps=17 + 16 + 5)
    assert "d" not in steps_of(engine, rows=8, seconds=1.0, tokens=2, steps=60)
    assert "d" in steps_of(engine, rows=2, seconds=1.0, tokens=2, steps=200)


def test_drafts_whose_steps_all_make_a_plan_have_saved_nothing_and_rest():
    engine = Speculation(32, 256)
    assert steps_of(engine, rows=1, seconds=0.1, tokens=2, steps=120, new_plan=True) == "." * 17 + "d" * 32 + "." * 71


def test_steps_of_more_rows_than_fit_draft_nothing():
    engine = Speculation(32, most_tokens=32)
    assert "d" not in steps_of(engine, rows=9, seconds=0.1, tokens=2, steps=200)
    assert "d" in steps_of(engine, rows=8, seconds=0.1, tokens=2, steps=200)


HISTORY = np.array([5, 6, 7, 8, *range(10, 30)], np.int32)


def proposal(
    engine: Speculation, answers: list[list[int]], *, room: Sequence[int] = (64,), places: int = 64
) -> Proposal | None:
    """What is proposed to calls that have said these answers to prompts of their own."""
    rows = len(answers)
    recent = [np.array([0] * 32 + said, np.int32)[-32:].tobytes() for said in answers]
    table = SimpleNamespace(recent=recent.__getitem__, room=lambda slots: np.resize(room, rows))
    order = SimpleNamespace(slots=np.arange(rows), steps_left=min(room))
    engine.begin_step(rows)
    return engine.propose(order, [said[-1] for said in answers], table, places)  # type: ignore[arg-type]


def begun(most_tokens: int, rows: int) -> Speculation:
    """Calls of as many prompts, to each of which ``HISTORY`` was an answer."""
    engine = Speculation(32, most_tokens)
    for name in range(rows):
        engine.remember(running(name).request.context_ids, HISTORY)
        engine.begin(SimpleNamespace(slot=name, request=running(name).request))  # type: ignore[arg-type]
    return engine


def test_the_longest_likely_draft_is_the_width_of_a_step_and_the_others_go_on_as_far():
    engine = begun(256, 2)
    engine._chances[11] = 0.1  # so the draft of the first call is likely up to 10 and 11
    found = proposal(engine, [[5, 6, 7, 8], [3, 3, 3, 3]])
    assert found == Proposal([[10, 11, 12], []], width=4)
    found = proposal(engine, [[5, 6, 7, 8], [15, 16, 17, 18]])
    assert found == Proposal([list(range(10, 17)), list(range(19, 26))], width=8)


@pytest.mark.parametrize(
    ("room", "places", "wanted"),
    [([64], 64, list(range(10, 17))), ([3], 64, [10, 11]), ([1], 64, None), ([64], 5, [10, 11, 12]), ([64], 3, None)],
    ids=["room", "a chunk of 3", "a chunk of 1", "5 places in the cache", "3 places in the cache"],
)
def test_drafts_end_with_the_chunk_and_the_cache(room, places, wanted):
    found = proposal(begun(256, 1), [[5, 6, 7, 8]], room=room, places=places)
    assert found == (wanted and Proposal([wanted], width=4 if len(wanted) < 4 else 8))


def test_each_call_has_room_of_its_own():
    found = proposal(begun(256, 2), [[5, 6, 7, 8]] * 2, room=[3, 64])
    assert found == Proposal([[10, 11], list(range(10, 17))], width=8)


def test_more_calls_share_the_tokens_of_a_step():
    found = proposal(begun(32, 8), [[5, 6, 7, 8]] * 8)
    assert found == Proposal([[10, 11, 12]] * 8, width=4)


def test_a_draft_that_was_accepted_whole_goes_on_where_it_ended_unless_another_token_follows():
    engine = begun(256, 1)
    whole = proposal(engine, [[5, 6, 7, 8]])
    assert whole == Proposal([list(range(10, 17))], width=8)
    engine.verified(np.arange(1), [8], whole, [8])
    # Too short a match to be looked up: it goes on.
    assert proposal(engine, [[0, 0, 0, 17]]) == Proposal([list(range(18, 25))], width=8)
    engine.verified(np.arange(1), [17], Proposal([list(range(18, 25))], width=8), [8])
    assert proposal(engine, [[0, 0, 0, 27]]) is None
