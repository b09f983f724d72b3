"""Chat formats of model families: the tokens of a conversation are those that the model sampled, and what came between.

The renderers come from another package, and so do their answers here: a conversation's own tokens are cut out of what
the renderer writes for it, and split in ways in which no tokenizer would split them.
"""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from renderers import config_from_name, create_renderer

from rollmesh.agents.chat_format import AnswerMessage, ChatFormats, NamedTokenizer
from rollmesh.agents.context_match import Context, Differs, Fits, Match, Repeats, Tail, TurnMark, mark_turn, match_next
from rollmesh.agents.openai_answers import MessageSoFar
from rollmesh.errors import ConfigError, DataError
from rollmesh.text import Tokenizer

from ...kit.chat_tokenizers import make_tokenizer
from ...kit.family_tokenizers import make_family_tokenizer
from ...kit.run_files import made_run

FAMILIES = (
    "qwen3", "prime-qwen3", "qwen3.5", "qwen3.6", "qwen3.8", "qwen3-vl", "gemma4", "glm-4.5", "glm-5", "glm-5.1",
    "glm-5.3", "hy3", "inkling", "kimi-k2", "kimi-k2.5", "laguna-xs.2", "laguna-m.1", "laguna-xs-2.1", "laguna-s-2.1",
    "llama-3", "minimax-m2", "nemotron-3", "nemotron-3-ultra", "nemotron-3.5",
)  # fmt: skip
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "text": {"type": "string"}}},
        },
    },
)
NONE = np.empty(0, np.int32)


def config(folder: Path, **agents: Any) -> Any:
    return made_run(folder, model={"path": str(folder)}, agents=agents)


@pytest.fixture(scope="module", params=FAMILIES)
def talk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> "Talk":
    folder = tmp_path_factory.mktemp("family")
    return Talk(make_family_tokenizer(folder, request.param), request.param)


words = st.text("abc \n{}<>|\"'\\é漢😀:,", min_size=1, max_size=30).filter(str.strip)
arguments = st.fixed_dictionaries({"a": st.integers(-9, 99)}, optional={"text": words})
turn = st.fixed_dictionaries(
    {
        "reasoning": st.one_of(st.just(""), words),
        "content": st.one_of(st.just(""), words),
        "calls": st.lists(arguments, max_size=3),
        "split": st.randoms(use_true_random=False),
    }
)


def sampled_ids(tokenizer: Tokenizer, ids: list[int], split: Any) -> list[int]:
    """The same text in tokens of the model's own choice: some are split into single bytes."""
    out: list[int] = []
    for token_id in ids:
        text = tokenizer.decode([token_id])
        pieces = [tokenizer.encode(letter) for letter in text] if text.isascii() and split.random() < 0.5 else []
        out += [int(i) for piece in pieces for i in piece] if pieces else [token_id]
    return out


class Talk:
    """A conversation whose answers are written by the renderer, in tokens of the model's own choice."""

    def __init__(self, tokenizer: Tokenizer, family: str) -> None:
        self.tokenizer, self.family = tokenizer, family
        self.renderer: Any = create_renderer(NamedTokenizer(tokenizer), config_from_name(family))
        chat = ChatFormats(config(tokenizer.folder, renderer=family), tokenizer).renderer_format({})
        self.chat = chat
        self.messages: list[dict[str, Any]] = []

    def answer(self, said: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.int32]] | None:
        """Tokens that say a message; None where the renderer begins the answer with something else."""
        calls = [
            {"id": f"functions.add:{n}", "type": "function", "function": {"name": "add", "arguments": call}}
            for n, call in enumerate(said["calls"])
        ]
        if not (said["content"] or calls) or (len(calls) > 1 and self.family == "llama-3"):  # it has one call an answer
            return None
        own = {"role": "assistant", "content": said["content"], "tool_calls": calls}
        own |= {"reasoning_content": said["reasoning"]} if said["reasoning"] else {}
        prompt = self.renderer.render_ids(self.messages, tools=list(TOOLS), add_generation_prompt=True)
        whole = self.renderer.render_ids([*self.messages, own], tools=list(TOOLS), add_generation_prompt=False)
        if whole[: len(prompt)] != prompt:
            return None
        ids, ends = whole[len(prompt) :], self.renderer.get_stop_token_ids()
        ids = ids[: next((at + 1 for at, token_id in enumerate(ids) if token_id in ends), len(ids))]
        # Some parsers know a call only by the tokens that a tokenizer gives its parts.
        return np.array(ids if calls else sampled_ids(self.tokenizer, ids, said["split"]), np.int32)

    def match(
        self,
        messages: list[dict[str, Any]],
        mark: TurnMark,
        context_ids: Any,
        answer: Any,
        said: AnswerMessage | None = None,
    ) -> Match:
        """Compare the messages of a call with a recorded context and answer."""
        text = self.chat.transcript(messages, TOOLS)
        return match_next(
            Context(text=text),
            mark,
            Tail(sampled=answer, environment=np.empty(0, np.int32)),
            np.concatenate([context_ids, answer]),
            lambda: self.chat.answer_lines(context_ids, answer, TOOLS, said),
            lambda rest: self.chat.next_ids(context_ids, answer, messages, rest.count("\n"), TOOLS),
        )


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(system=st.booleans(), turns=st.lists(turn, min_size=1, max_size=3), heard=words)
def test_the_tokens_of_a_conversation_are_those_sampled_and_what_came_between(
    talk: Talk, system: bool, turns: list[dict[str, Any]], heard: str
) -> None:
    talk.messages = [{"role": "system", "content": "Be brief."}] * system + [{"role": "user", "content": heard}]
    recorded = talk.chat.ids(talk.messages, TOOLS)
    for said in turns:
        before = list(talk.messages)
        answer = talk.answer(said)
        assume(answer is not None)
        message = talk.chat.message(recorded, answer.tolist(), TOOLS, read_calls=True)
        assert [call["function"]["name"] for call in message.tool_calls] == ["add"] * len(said["calls"])
        assert not message.invalid_tool_calls
        heard_now = [
            {"role": "tool", "tool_call_id": call["id"], "name": "add", "content": f"result {n}"}
            for n, call in enumerate(message.tool_calls)
        ] or [{"role": "user", "content": f"again {heard}"}]
        # The client sends the message back without its thought.
        echo = {"role": "assistant", "content": message.content, "tool_calls": list(message.tool_calls)}
        talk.messages += [echo, *heard_now]
        mark = mark_turn(Context(text=talk.chat.transcript(before, TOOLS)), 0)
        match = talk.match(talk.messages, mark, recorded, answer)
        remembered = talk.match(talk.messages, mark, recorded, answer, message)
        assert [m.new_ids.tolist() for m in (remembered,) if isinstance(m, Fits)] == [
            m.new_ids.tolist() for m in (match,) if isinstance(m, Fits)
        ]
        if isinstance(match, Differs):
            # Formats drop thoughts, empty ones too, before the next message of the user; never within a chain of tools.
            assert not message.tool_calls
            recorded = talk.chat.ids(talk.messages, TOOLS)
            continue
        assert isinstance(match, Fits)
        between = talk.tokenizer.decode(match.new_ids, special_tokens=True)
        assert all(new["content"].strip() in between for new in heard_now)
        assert isinstance(talk.match(before, mark, recorded, answer), Repeats)
        if len(message.tool_calls) > 1:  # as of a client that takes one call at most, after a restart of the service
            first = {**echo, "tool_calls": list(message.with_one_call().tool_calls)}
            assert isinstance(talk.match([*before, first, heard_now[0]], mark, recorded, answer), Fits)
        recorded = np.concatenate([recorded, answer, match.new_ids])


def test_a_call_that_does_not_parse_is_typed_and_the_others_are_read(tmp_path: Path) -> None:
    tokenizer = make_family_tokenizer(tmp_path, "qwen3")
    chat = ChatFormats(config(tmp_path, renderer="qwen3"), tokenizer).renderer_format({})
    text = (
        '<think>\nhm\n</think>\n\nLet me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arg\n</tool_call>\n<tool_call>\n{"name": "add"'
    )
    said = chat.message(NONE, tokenizer.encode(text).tolist(), TOOLS, read_calls=True)
    assert (said.content, said.reasoning) == ("Let me see.", "hm")
    assert [call["function"] for call in said.tool_calls] == [{"name": "add", "arguments": '{"a": 1}'}]
    assert [call["error"] for call in said.invalid_tool_calls] == ["invalid_json", "unclosed_block"]


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "add", "arguments": {"a": NUMBER}}'.replace("NUMBER", "7" * 5000),
        "[" * 100_000,
        '{"name": 5, "arguments": {}}',
        '{"name": "add", "arguments": {"a": NaN}}',
        '{"name": "add", "arguments": {"text": "\\ud83d"}}',
        '{"name": "add", "arguments": [1]}',
    ],
)
def test_a_call_that_no_client_could_send_back_is_typed_and_never_an_error(tmp_path: Path, call: str) -> None:
    tokenizer = make_family_tokenizer(tmp_path, "qwen3")
    chat = ChatFormats(config(tmp_path, renderer="qwen3"), tokenizer).renderer_format({})
    said = chat.message(NONE, tokenizer.encode(f"<tool_call>\n{call}\n</tool_call>").tolist(), TOOLS, read_calls=True)
    assert not said.tool_calls and len(said.invalid_tool_calls) == 1
    json.dumps(said.invalid_tool_calls, ensure_ascii=False).encode()
    unread = chat.message(NONE, tokenizer.encode("see <tool_call>x</tool_call>").tolist(), TOOLS, read_calls=False)
    assert unread.content == "see <tool_call>x</tool_call>" and not unread.invalid_tool_calls


@pytest.mark.parametrize("read_calls", [True, False])
def test_a_streamed_message_is_the_whole_one_in_the_families_that_stream(talk: Talk, read_calls: bool) -> None:
    talk.messages = [{"role": "user", "content": "what is 2 + 3?"}]
    context_ids = talk.chat.ids(talk.messages, TOOLS)
    calls = [{"a": 2, "text": "a < b"}, {"a": 3}][: 1 if talk.family == "llama-3" else 2]
    whole: list[bool] = []
    for said in (
        {"reasoning": "line one\n\nline two", "content": "It is five. Really.", "calls": []},
        {"reasoning": "", "content": "Let me see.", "calls": calls},
        {"reasoning": "I think so", "content": "", "calls": calls},
        {"reasoning": "I think so", "content": "I call", "calls": calls},
        {"reasoning": "I think so", "content": "t", "calls": calls, "after": " so it is"},
        {"reasoning": "", "content": "# Title\n\n  indented é", "calls": []},
    ):
        answer = talk.answer({**said, "split": random.Random(0)})
        if answer is None:
            continue
        ids = answer.tolist()
        ids[-1:-1] = talk.tokenizer.encode(said.get("after", "")).tolist()

        def read(ids: Any) -> AnswerMessage:
            return talk.chat.message(context_ids, ids, TOOLS, read_calls=read_calls)

        sent, parts, heard = MessageSoFar(), dict[str, str](), list[Any]()
        for end in range(1, len(ids) + 1):
            news = sent.news(read, ids[:end], final=end == len(ids))
            heard += news.get("tool_calls", [])
            parts |= {k: parts.get(k, "") + v for k, v in news.items() if isinstance(v, str)}
        message = read(ids)
        assert "think>" not in message.content
        whole.append(
            (parts.get("content", ""), parts.get("reasoning_content", "")) == (message.content, message.reasoning)
            and [call["function"] for call in heard] == [call["function"] for call in message.tool_calls]
        )
    assert talk.chat.streams <= all(whole), "a family that streams sends what the whole message has"


def test_no_message_is_left_out_by_a_format(talk: Talk) -> None:
    """A message is in the tokens, or the request is refused."""
    for place in (0, 1):
        messages: list[dict[str, Any]] = [{"role": "user", "content": "what is 2 + 3?"}]
        messages.insert(place, {"role": "system", "content": "never forget the milk"})
        try:
            text = talk.tokenizer.decode(talk.chat.ids(messages, ()), special_tokens=True)
        except DataError:
            continue
        assert "never forget the milk" in text


def test_a_renderer_that_does_not_know_the_tokenizer_is_refused_with_the_setting(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    for agents, words in (
        ({"renderer": "qwen3"}, "agents.renderer: qwen3 does not fit the tokenizer"),
        ({"renderer": "qwen4"}, "agents.renderer: 'qwen4' is unknown; known are qwen3, "),
        ({"renderer": "template", "tool_parser": "hermes"}, "agents.tool_parser: 'hermes' is unknown"),
    ):
        with pytest.raises(ConfigError, match=words):
            ChatFormats(config(tmp_path, **agents), tokenizer)
    assert ChatFormats(config(tmp_path), tokenizer).renderer_format({}) is None, "ChatML alone is no family's format"


@pytest.mark.parametrize("own_system", ["", "You are a model."])
def test_auto_takes_the_family_that_writes_what_the_chat_template_writes(tmp_path: Path, own_system: str) -> None:
    from renderers import qwen3

    # The format is a fact of the model; the words of its header come from the package.
    template = (
        (
            "{% set system = messages[0].content if messages[0].role == 'system' else OWN %}"
            "{% if system or tools %}{{ '<|im_start|>system\n' ~ system }}"
            "{% if tools %}{{ '\n\n' if system else '' }}HEAD"
            "{% for tool in tools %}{{ '\n' ~ (tool | tojson) }}{% endfor %}FOOT{% endif %}"
            "{{ '<|im_end|>\n' }}{% endif %}"
            "{% for m in messages if m.role != 'system' %}"
            "{% if m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' ~ m.content ~ '\n</tool_response>' }}"
            "{% else %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content }}"
            "{% for call in m.tool_calls or [] %}"
            '{{ \'<tool_call>\n{"name": "\' ~ call.function.name ~ \'", "arguments": \' }}'
            "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}"
            "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
        )
        .replace("HEAD", f"{{{{ {qwen3._TOOLS_HEADER!r} }}}}")
        .replace("FOOT", f"{{{{ {qwen3._TOOLS_FOOTER!r} }}}}")
        .replace("OWN", repr(own_system))
    )
    tokenizer = make_family_tokenizer(tmp_path, "qwen3", template)
    chat = ChatFormats(config(tmp_path), tokenizer).renderer_format({})
    if own_system:
        assert chat is None, "the family writes no system message where a conversation has none"
        return
    assert chat is not None
    assert ChatFormats(config(tmp_path, renderer="template"), tokenizer).renderer_format({}) is None
    with pytest.raises(DataError, match="chat_template_kwargs: the renderer .* refuses"):
        ChatFormats(config(tmp_path), tokenizer).renderer_format({"no_such_variable": 1})
