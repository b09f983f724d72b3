"""Text of an answer while it arrives: whole characters, stop strings, and the tokens that count."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.agents.answer_stream import AnswerTurn, TextStream, find_stop, held_back
from rollmesh.text import Tokenizer
from rollmesh.types import Segment

from ...kit.chat_tokenizers import make_tokenizer
from ...kit.records import policy_tokens

NONE = np.empty(0, np.int32)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def segment(ids: list[int] | np.ndarray, version: int = 0) -> Segment:
    return policy_tokens(ids, version, behavior_logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32))


def character_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token per byte: never how a tokenizer would write it, often how a model does."""
    return [int(i) for c in text for i in tokenizer.encode(c)]


def test_a_character_of_several_tokens_appears_once_it_is_whole(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, NONE)
    seen = []
    for token_id in tokenizer.encode("a\u00e9\U0001f600b").tolist():
        stream.push(token_id)
        seen.append(stream.text)
    assert seen[-1] == "a\u00e9\U0001f600b"
    assert not any("\ufffd" in text for text in seen)
    assert stream.text_ends == [len(text) for text in seen]


def test_bytes_that_never_become_a_character_are_told_at_the_end(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, NONE)
    for token_id in tokenizer.encode("\U0001f600").tolist()[:2]:
        stream.push(token_id)
    assert stream.text == ""
    stream.flush()
    assert stream.text.startswith("\ufffd")
    assert stream.text_ends[-1] == len(stream.text)


def test_special_tokens_are_in_the_raw_text_only(tokenizer: Tokenizer) -> None:
    turn = AnswerTurn(tokenizer, NONE)
    turn.feed(segment(tokenizer.encode("hello<|im_end|>")))
    assert (turn.text, turn.raw) == ("hello", "hello<|im_end|>")
    assert turn.logprobs()[-1].token == "<|im_end|>"


@given(text=st.text(max_size=30), cuts=st.lists(st.integers(0, 30), max_size=4))
def test_the_pieces_told_are_the_decoded_whole_however_the_tokens_arrive(
    tokenizer: Tokenizer, text: str, cuts: list[int]
) -> None:
    ids = tokenizer.encode(text).tolist()
    edges = sorted({0, len(ids), *(min(c, len(ids)) for c in cuts)})
    turn = AnswerTurn(tokenizer, NONE)
    told = ""
    for start, end in itertools.pairwise(edges):
        turn.feed(segment(ids[start:end]))
        told += turn.new_text()
    turn.finish()
    told += turn.new_text(final=True)
    assert told == turn.text == tokenizer.decode(ids)
    assert turn.raw == tokenizer.decode(ids, special_tokens=True)


@given(text=st.text("ab!", max_size=12), stops=st.lists(st.text("ab!", min_size=1, max_size=4), min_size=1, max_size=3))
def test_what_is_held_back_is_the_least_that_a_stop_string_could_need(text: str, stops: list[str]) -> None:
    back = held_back(text, stops)
    can_become = [n for n in range(1, len(text) + 1) if any(len(s) > n and s.startswith(text[-n:]) for s in stops)]
    assert back == max(can_become, default=0)
    place = find_stop(text, stops)
    ends = [n for n in range(len(text) + 1) if any(text[:n].endswith(s) for s in stops)]
    longest = max((len(s) for s in stops if ends and text[: ends[0]].endswith(s)), default=0)
    assert place == (ends[0] - longest if ends else None)


@given(
    text=st.text("abO:n \n", max_size=20),
    stops=st.lists(st.text("abO:n \n", min_size=1, max_size=4), min_size=1, max_size=3),
    by_character=st.booleans(),
    size=st.integers(1, 5),
)
def test_a_stop_string_ends_the_answer_before_it_however_it_is_tokenised(
    tokenizer: Tokenizer, text: str, stops: list[str], by_character: bool, size: int
) -> None:
    ids = character_ids(tokenizer, text) if by_character else tokenizer.encode(text).tolist()
    turn = AnswerTurn(tokenizer, NONE, stops)
    told = ""
    for start in range(0, len(ids), size):
        turn.feed(segment(ids[start : start + size]))
        told += turn.new_text()
        if turn.stopped:
            break
    turn.finish()
    told += turn.new_text(final=True)
    place = find_stop(text, stops)
    assert turn.stopped == (place is not None)
    assert told == turn.text == (text if place is None else text[:place])
    assert turn.text.startswith(turn.raw), "the tokens that count write nothing but the answer"
    assert turn.token_ids.tolist() == ids[: turn.token_count]
    if by_character:
        assert turn.raw == turn.text


def test_news_never_shows_what_may_become_a_stop_string(tokenizer: Tokenizer) -> None:
    turn = AnswerTurn(tokenizer, NONE, ["Observation:"])
    turn.feed(segment(character_ids(tokenizer, "the answer Obser")))
    assert turn.new_text() == "the answer "
    assert turn.undecided
    turn.feed(segment(character_ids(tokenizer, "ve ")))
    assert turn.new_text() == "Observe "
    turn.feed(segment(character_ids(tokenizer, "Observation: 42")))
    assert (turn.new_text(), turn.new_text(final=True)) == ("", "")
    assert turn.text == "the answer Observe "
    assert turn.token_count == len("the answer Observe ")


def test_logprobs_and_versions_are_those_of_the_tokens_that_count(tokenizer: Tokenizer) -> None:
    turn = AnswerTurn(tokenizer, NONE, ["!"])
    turn.feed(segment(character_ids(tokenizer, "ab"), version=3))
    turn.feed(segment(character_ids(tokenizer, "!c"), version=4))
    assert [(t.token, t.logprob) for t in turn.logprobs()] == [("a", -1.0), ("b", -2.0)]
    assert [t.token for t in turn.logprobs(1)] == ["b"]
    assert turn.policy_versions == (3,)


def test_the_first_word_reads_as_it_does_behind_its_context(tokenizer: Tokenizer) -> None:
    context = tokenizer.encode("hello")
    turn = AnswerTurn(tokenizer, context)
    turn.feed(segment(tokenizer.encode(" world")))
    assert turn.text == " world"
