"""Contexts that go on with what is recorded, repeat it, or have drifted from it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.agents.answer_stream import AnswerTurn
from rollmesh.agents.context_match import (
    Context,
    Differs,
    Fits,
    Match,
    Repeats,
    TurnMark,
    mark_turn,
    match_first,
    match_next,
    tail_of,
)
from rollmesh.text import Tokenizer
from rollmesh.types import Int32Array, Segment

from ...kit.chat_tokenizers import CHATML, make_tokenizer
from ...kit.records import environment_tokens, policy_tokens

TASK = [{"role": "user", "content": "the quick brown fox"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@dataclass
class Record:
    """A trajectory as the gateway keeps it, without the gateway."""

    tokenizer: Tokenizer
    prompt: Int32Array
    segments: list[Segment] = field(default_factory=list)
    mark: TurnMark | None = None

    @property
    def ids(self) -> Int32Array:
        return np.concatenate([self.prompt, *(s.token_ids for s in self.segments)])

    def match(self, context: Context) -> Match:
        if self.mark is None:
            return match_first(self.prompt, context, self.tokenizer.encode)
        tail = tail_of(self.segments, self.mark.at)

        def raw() -> list[str]:
            turn = AnswerTurn(self.tokenizer, self.ids[: len(self.prompt) + self.mark.at])
            turn.feed(policy_tokens(tail.sampled))
            return [turn.raw]

        return match_next(context, self.mark, tail, self.ids, raw, self.tokenizer.encode)

    def hear(self, context: Context) -> Match:
        """Add what is new of the context, and mark the turn."""
        match = self.match(context)
        if isinstance(match, Fits):
            if len(match.new_ids):
                self.segments.append(environment_tokens(match.new_ids))
            self.mark = mark_turn(context, sum(len(s) for s in self.segments))
        return match

    def write(self, ids: Sequence[int]) -> None:
        self.segments.append(policy_tokens(ids))


def chat(tokenizer: Tokenizer, *messages: dict[str, str]) -> Context:
    return Context(text=tokenizer.chat_text([*TASK, *messages]))


def begun(tokenizer: Tokenizer) -> Record:
    """A trajectory whose first call has been heard."""
    record = Record(tokenizer, tokenizer.render_chat(TASK))
    assert isinstance(record.hear(chat(tokenizer)), Fits)
    return record


def by_bytes(tokenizer: Tokenizer, text: str) -> list[int]:
    return [int(i) for c in text for i in tokenizer.encode(c)]


def test_a_first_context_equal_to_the_prompt_adds_nothing(tokenizer: Tokenizer) -> None:
    record = begun(tokenizer)
    assert record.segments == []
    assert record.mark is not None and record.mark.at == 0


def test_a_first_context_that_does_not_begin_with_the_prompt_says_where_it_differs(tokenizer: Tokenizer) -> None:
    record = Record(tokenizer, tokenizer.render_chat(TASK))
    other = Context(text=tokenizer.chat_text([say("system", "be brief"), *TASK]))
    match = record.match(other)
    assert "token 1" in match.why
    short = record.match(Context(text="<|im_start|>"))
    assert isinstance(short, Differs) and "1 tokens" in short.why


@given(answer=st.text("hello wrd;é\U0001f600\n", min_size=1, max_size=12), split=st.booleans())
def test_sampled_ids_stay_as_they_are_however_the_text_would_be_tokenised(
    tokenizer: Tokenizer, answer: str, split: bool
) -> None:
    record = begun(tokenizer)
    written = (by_bytes(tokenizer, answer) if split else tokenizer.encode(answer).tolist()) + [
        *tokenizer.encode("<|im_end|>").tolist()
    ]
    record.write(written)
    following = chat(tokenizer, say("assistant", answer), say("user", "and the answer?"))
    match = record.hear(following)
    assert isinstance(match, Fits)
    assert record.ids[len(record.prompt) : len(record.prompt) + len(written)].tolist() == written
    assert tokenizer.decode(record.ids, special_tokens=True) == following.text
    assert isinstance(record.match(following), Repeats)


def test_an_answer_that_was_cut_short_is_closed_by_the_environment(tokenizer: Tokenizer) -> None:
    record = begun(tokenizer)
    record.write(tokenizer.encode("hello wor").tolist())
    match = record.hear(chat(tokenizer, say("assistant", "hello wor"), say("user", "go on")))
    assert tokenizer.decode(match.new_ids, special_tokens=True).startswith("<|im_end|>\n<|im_start|>user")


def test_an_answer_that_a_call_begins_is_continued_in_the_record(tokenizer: Tokenizer) -> None:
    record = Record(tokenizer, tokenizer.render_chat(TASK))
    match = record.hear(chat(tokenizer, say("assistant", "the answer is")))
    assert isinstance(match, Fits) and tokenizer.decode(match.new_ids) == "the answer is"
    record.write(tokenizer.encode(" 4").tolist())
    cut_off = record.hear(chat(tokenizer, say("assistant", "the answer is 4")))
    assert isinstance(cut_off, Fits) and not len(cut_off.new_ids), "an answer at the limit of its tokens goes on"
    record.write(tokenizer.encode("2<|im_end|>").tolist())
    following = chat(tokenizer, say("assistant", "the answer is 42"), say("user", "and?"))
    assert isinstance(record.hear(following), Fits)
    assert tokenizer.decode(record.ids, special_tokens=True) == following.text


@pytest.mark.parametrize(
    ("content", "why"),
    [("hello World", "was sent back as"), ("hello", "was sent back as"), (" hello world", "was sent back as")],
)
def test_an_answer_that_comes_back_otherwise_has_drifted(tokenizer: Tokenizer, content: str, why: str) -> None:
    record = begun(tokenizer)
    record.write(tokenizer.encode("hello world<|im_end|>").tolist())
    match = record.match(chat(tokenizer, say("assistant", content), say("user", "and?")))
    assert why in match.why


def test_a_template_that_strips_what_was_written_makes_drift(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, CHATML.replace("{{ m.content }}", "{{ m.content | trim }}"))
    record = begun(tokenizer)
    record.write(tokenizer.encode(" hello<|im_end|>").tolist())
    assert isinstance(record.match(chat(tokenizer, say("assistant", " hello"), say("user", "and?"))), Differs)


def test_an_edited_history_before_the_newest_answer_has_drifted(tokenizer: Tokenizer) -> None:
    record = begun(tokenizer)
    record.write(tokenizer.encode("hello<|im_end|>").tolist())
    record.hear(chat(tokenizer, say("assistant", "hello"), say("user", "and?")))
    record.write(tokenizer.encode("42<|im_end|>").tolist())
    edited = chat(tokenizer, say("assistant", "HELLO"), say("user", "and?"), say("assistant", "42"), say("user", "ok"))
    match = record.match(edited)
    assert "before the newest answer" in match.why


def test_a_context_that_was_saved_before_a_crash_is_not_added_twice(tokenizer: Tokenizer) -> None:
    record = begun(tokenizer)
    record.write(tokenizer.encode("hello<|im_end|>").tolist())
    following = chat(tokenizer, say("assistant", "hello"), say("user", "and?"))
    mark = record.mark
    record.hear(following)
    heard = record.ids
    record.mark = mark  # the process died between the tokens and their mark
    match = record.hear(following)
    assert isinstance(match, Fits) and len(match.new_ids) == 0
    assert np.array_equal(record.ids, heard)
    record.mark = mark
    assert isinstance(record.match(chat(tokenizer, say("assistant", "hello"), say("user", "what?"))), Differs)


def test_ids_are_compared_as_ids(tokenizer: Tokenizer) -> None:
    record = begun(tokenizer)
    record.write(by_bytes(tokenizer, "hello"))
    whole = record.ids
    more = np.append(whole, np.int32(5))

    def ids(array: Int32Array) -> Context:
        return Context(text=tokenizer.decode(array, special_tokens=True), token_ids=array)

    match = record.match(ids(more))
    assert isinstance(match, Fits) and match.new_ids.tolist() == [5]
    assert isinstance(record.match(ids(record.prompt)), Repeats)
    assert isinstance(record.match(ids(whole)), Fits)
    canonical = np.concatenate([record.prompt, tokenizer.encode("hello")]).astype(np.int32)
    assert len(canonical) != len(whole)
    assert isinstance(record.match(ids(canonical)), Differs)


def test_a_first_context_may_go_on_after_the_prompt(tokenizer: Tokenizer) -> None:
    record = Record(tokenizer, tokenizer.encode("the quick"))
    match = record.hear(Context(text="the quick brown fox"))
    whole = tokenizer.encode("the quick brown fox")
    if np.array_equal(whole[: len(record.prompt)], record.prompt):
        assert isinstance(match, Fits)
        assert np.array_equal(record.ids, whole)
    else:
        pytest.fail(f"the test's tokenizer joins words: {whole}")
