"""Chat format of a run's model: messages to tokens, and the tokens of an answer to the message that they say.

A renderer (package ``renderers``) knows the format of a model family by its tokens: it reads thoughts and tool calls
out of sampled ids, and appends a next turn to them without tokenizing them again. A family without one is written by
the chat template of the tokenizer.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from rollmesh.chat_template import Message
from rollmesh.config import RunConfig
from rollmesh.config.services import AgentsConfig
from rollmesh.errors import ConfigError, DataError
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tasks import MOST_CHARACTERS
from rollmesh.text import Tokenizer
from rollmesh.types import BoolArray, Int32Array

if TYPE_CHECKING:
    from renderers import ParsedToolCall, Renderer

Tools = Sequence[Mapping[str, Any]]
_NO_NAME = ("auto", "template")
_READ_WHOLE = frozenset({"gemma4", "gpt-oss", "inkling", "kimi-k2.5", "llama-3"})
"""Families whose parsers read a part of an answer otherwise than the whole: llama-3 the beginning of a call as text,
for example. Their messages are streamed at the end. (gpt-oss is not tested: its vocabulary is not in the package.)"""
_MOST_FORMATS = 64
"""Number of formats, one for each choice of variables, that are kept."""
_MOST_TEXTS = 256
"""Number of short texts whose tokens are kept."""

# Compared whole, without its system message, where some templates have one of their own, and as a question alone.
_PROBE: tuple[Message, ...] = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 3?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c0", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}],
    },
    {"role": "tool", "name": "add", "tool_call_id": "c0", "content": "5"},
)
_PROBE_TOOLS: Tools = (
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
        },
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerMessage:
    """Message that the tokens of an answer say."""

    content: str
    reasoning: str = ""
    tool_calls: Sequence[Mapping[str, Any]] = ()
    """Calls in OpenAI's format."""
    invalid_tool_calls: Sequence[Mapping[str, Any]] = ()
    """Calls that the client does not get as such, with name, args (their text) and error (why)."""

    def with_one_call(self) -> "AnswerMessage":
        """Return the message for a client that takes one call at most."""
        extra = [
            {
                "name": call["function"]["name"],
                "args": call["function"]["arguments"],
                "error": "not the first call of the answer (parallel_tool_calls: false)",
            }
            for call in self.tool_calls[1:]
        ]
        return replace(self, tool_calls=self.tool_calls[:1], invalid_tool_calls=[*self.invalid_tool_calls, *extra])


class RendererFormat:
    """Format that a renderer knows; a conversation is compared message by message, and its tokens are appended to."""

    def __init__(self, name: str, renderer: "Renderer", tokenizer: Tokenizer, variables: Mapping[str, Any]) -> None:
        self.streams = name not in _READ_WHOLE and not name.startswith("deepseek")
        """True if the message of a part of an answer is a part of its message."""
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._variables = variables

    def transcript(self, messages: Sequence[Message], tools: Tools) -> str:
        """Return a conversation as lines of JSON: variables and tools, then its messages without thoughts of answers.

        Raises DataError for values that are nested too deeply.
        """
        try:
            return f"{_json([self._variables, list(tools)])}\n{''.join(map(_line, messages))}"
        except RecursionError as error:
            raise DataError("the lists and objects of tools or arguments are nested too deeply") from error

    def answer_lines(
        self, context_ids: Int32Array, answer_ids: Int32Array, tools: Tools, said: AnswerMessage | None = None
    ) -> Iterator[str]:
        """Yield the lines that an answer may have in the transcript of a later call.

        First that of ``said``, the message that its client got, where it is known; then with its calls read, and left
        as text.
        """
        if said is not None:
            yield _answer_line(said)
        for read_calls in (True, False):
            message = self.message(context_ids, answer_ids.tolist(), tools, read_calls=read_calls)
            yield _answer_line(message)
            if len(message.tool_calls) > 1:
                yield _answer_line(message.with_one_call())

    def ids(self, messages: Sequence[Message], tools: Tools) -> Int32Array:
        """Return the tokens of a conversation and of the beginning of an answer; DataError for refused messages."""
        given: Any = [dict(message) for message in messages]
        try:
            rendered = self._renderer.render(given, tools=list(tools) or None, add_generation_prompt=True)
        except Exception as error:  # every family refuses messages with errors of its own
            raise DataError(f"the renderer of the model refuses the messages: {error}") from error
        written = set(rendered.message_indices)
        for number, message in enumerate(messages):
            if message["content"].strip() and number not in written:
                raise DataError(f"the format of the model writes no {message['role']!r} message at place {number}")
        return np.array(rendered.token_ids, np.int32)

    def conversation(self, messages: Sequence[Message], tools: Tools) -> tuple[Int32Array, BoolArray]:
        """Return the tokens of a whole conversation, and which are of answers, with the token that ends each.

        Raises DataError for messages that the renderer refuses.
        """
        from renderers import build_training_sample

        given: Any = [dict(message) for message in messages]
        try:
            sample = build_training_sample(self._renderer, given, tools=list(tools) or None, ensure_final_stop=True)
        except Exception as error:  # every family refuses messages with errors of its own
            raise DataError(f"the renderer of the model refuses the messages: {error}") from error
        return np.array(sample.token_ids, np.int32), np.array(sample.loss_mask, np.bool_)

    def next_ids(
        self, context_ids: Int32Array, answer_ids: Int32Array, messages: Sequence[Message], new: int, tools: Tools
    ) -> Int32Array | None:
        """Return the tokens of the last ``new`` messages after an answer; None if they do not continue its tokens.

        They do not where the format drops the thoughts of earlier turns.
        """
        added: Any = [dict(message) for message in messages[len(messages) - new :]]
        try:
            bridged = self._renderer.bridge_to_next_turn(
                context_ids.tolist(), answer_ids.tolist(), added, tools=list(tools) or None
            )
        except Exception as error:  # every family refuses messages with errors of its own
            raise DataError(f"the renderer of the model refuses the messages: {error}") from error
        ids = self.ids(messages, tools) if bridged is None else np.array(bridged.token_ids, np.int32)
        known = np.concatenate([context_ids, answer_ids])
        return ids[len(known) :] if np.array_equal(ids[: len(known)], known) else None

    def message(
        self, context_ids: Int32Array, answer_ids: Sequence[int], tools: Tools, *, read_calls: bool
    ) -> AnswerMessage:
        """Read the message of an answer, which may be incomplete; calls that are not read are part of its content."""
        ids, given = list(answer_ids), {"tools": list(tools) or None, "prompt_ids": context_ids.tolist()}
        try:
            parsed = self._renderer.parse_response(ids, **given)
            if parsed.tool_calls and not read_calls:
                # The content begins as that of a stream does before the first call, and goes on to the end.
                first, _ = parsed.tool_calls[0].token_span or (0, 0)
                before, text = self._renderer.parse_response(ids[:first], **given), _text(self._tokenizer, ids)
                begins = text.rfind(before.content.strip(), 0, len(text) - len(_text(self._tokenizer, ids[first:])))
                return AnswerMessage(content=text[begins:].strip(), reasoning=(parsed.reasoning_content or "").strip())
        except Exception as error:  # what a policy writes can break a parser in many ways
            return _unreadable(_text(self._tokenizer, ids), error)
        return _answer_message(parsed.content, parsed.reasoning_content or "", parsed.tool_calls, context_ids)


def read_calls(tokenizer: Tokenizer, parser: str, context_ids: Int32Array, answer_ids: Sequence[int]) -> AnswerMessage:
    """Read the tool calls of an answer in a format without a renderer; a thought stays in the content."""
    from renderers.parsers import get_tool_parser

    ids = list(answer_ids)
    try:
        content_ids, calls = get_tool_parser(parser, NamedTokenizer(tokenizer)).extract(ids)
    except Exception as error:  # what a policy writes can break a parser in many ways
        return _unreadable(_text(tokenizer, ids), error)
    said = _answer_message(tokenizer.decode(content_ids), "", calls, context_ids)
    # The template writes its own line break before calls, and nothing of a call that cannot be read.
    content = tokenizer.decode(ids) if said.invalid_tool_calls else said.content.removesuffix("\n")
    return replace(said, content=content) if calls else said


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of an answer with the markers of its format, without the token that ends it."""
    return tokenizer.decode([i for i in ids if i not in tokenizer.eos_token_ids], special_tokens=True)


def _unreadable(text: str, error: Exception) -> AnswerMessage:
    call = {"name": None, "args": text, "error": f"{type(error).__name__}: {error}"[:200]}
    return AnswerMessage(content="", invalid_tool_calls=[call])


class ChatFormats:
    """Formats of a run's model, by the variables of its chat template."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        """Choose the renderer that ``agents.renderer`` names, or the one that writes what the chat template writes.

        Raises ConfigError if the package is missing or the named renderer does not know the tokenizer.
        """
        self.tokenizer = tokenizer
        self.tool_parser = config.agents.tool_parser
        self._variables = config.data.chat_template_kwargs
        self._options = config.agents.renderer_options
        self._formats: dict[str, RendererFormat] = {}
        check_named_format(config.agents, tokenizer, self._variables)
        self._renderer = "" if config.agents.renderer == "template" else config.agents.renderer
        if self._renderer == "auto":
            self._renderer = _matching_renderer(tokenizer, self._options, self._variables) if _is_installed() else ""
        get_logger("agents").info("chat_format", renderer=self._renderer or "none: the tokenizer's chat template")

    @property
    def renders(self) -> bool:
        """True if a renderer writes the messages of a call."""
        return bool(self._renderer)

    @property
    def names_results(self) -> bool:
        """True if a result may carry the name of its function; Kimi's format prints a name in place of the role."""
        return not self._renderer.startswith("kimi")

    def renderer_format(self, added: Mapping[str, Any]) -> RendererFormat | None:
        """Return the renderer's format with the variables of a call, or None; DataError for unknown variables."""
        if not self._renderer:
            return None
        variables = {**self._variables, **added}
        key = _json(variables)
        known = self._formats.get(key)
        if known is None:
            try:
                renderer = _make_renderer(self._renderer, self.tokenizer, self._options, variables)
            except Exception as error:  # the package raises its own and pydantic's errors
                raise DataError(f"chat_template_kwargs: the renderer {self._renderer} refuses them: {error}") from error
            if len(self._formats) >= _MOST_FORMATS:
                self._formats.clear()
            known = self._formats[key] = RendererFormat(self._renderer, renderer, self.tokenizer, variables)
        return known


def answers_format(tokenizer: Tokenizer, variables: Mapping[str, Any]) -> RendererFormat | None:
    """Return the format of the renderer that writes what the chat template writes; None if none tells answers apart."""
    name = _matching_renderer(tokenizer, {}, variables) if _is_installed() else ""
    if not name:
        return None
    found = RendererFormat(name, _make_renderer(name, tokenizer, {}, variables), tokenizer, variables)
    try:
        found.conversation(_PROBE, _PROBE_TOOLS)
    except DataError:
        return None
    return found


def _is_installed() -> bool:
    return find_spec("renderers") is not None


def _known_renderers() -> list[str]:
    """Return the names of the text formats that the package knows, except for the one that wraps a chat template."""
    from renderers import RendererConfig

    configs = get_args(get_args(RendererConfig)[0])
    names = [config.model_fields["name"].default for config in configs]
    return [name for name in names if name not in ("auto", "custom", "default")]


def _make_renderer(
    name: str, tokenizer: Tokenizer, options: Mapping[str, Any], variables: Mapping[str, Any]
) -> "Renderer":
    from renderers import config_from_name, create_renderer

    config: Any = type(config_from_name(name))(**options)
    return create_renderer(NamedTokenizer(tokenizer), config, chat_template_kwargs=variables)


def check_named_format(config: AgentsConfig, tokenizer: Tokenizer, variables: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the package is there and knows the named renderer and parser for this tokenizer."""
    field, name = (
        ("renderer", config.renderer) if config.renderer not in _NO_NAME else ("tool_parser", config.tool_parser)
    )
    if not name:
        return
    if not _is_installed():
        raise ConfigError(f"agents.{field}: {name} needs the package renderers: pip install 'rollmesh[agents]'")
    from renderers.parsers import TOOL_PARSERS, get_tool_parser

    known = _known_renderers() if field == "renderer" else sorted(TOOL_PARSERS)
    if name not in known:
        raise ConfigError(f"agents.{field}: {name!r} is unknown; known are {', '.join(known)}")
    try:
        if field == "renderer":
            _make_renderer(name, tokenizer, config.renderer_options, variables)
        else:
            get_tool_parser(name, NamedTokenizer(tokenizer))
    except Exception as error:  # every family has errors of its own
        raise ConfigError(
            f"agents.{field}: {name} does not fit the tokenizer of {tokenizer.folder}, or agents.renderer_options "
            f"(or data.chat_template_kwargs) do not fit it: {error or type(error).__name__}"
        ) from error


def _matching_renderer(tokenizer: Tokenizer, options: Mapping[str, Any], variables: Mapping[str, Any]) -> str:
    """Return the renderer that writes every probe as the chat template does, or an empty text."""
    if not tokenizer.has_chat_template:
        return ""
    probes = [(_PROBE, _PROBE_TOOLS), (_PROBE[1:], _PROBE_TOOLS), (_PROBE[1:2], ())]
    try:
        texts = [tokenizer.chat_text(probe, variables=variables, tools=tools) for probe, tools in probes]
    except DataError:
        return ""
    expected = [tokenizer.encode(text) for text in texts]
    for name in _known_renderers():
        if name == "gpt-oss":  # it prints today's date, so no template with a fixed one agrees, and loads a vocabulary
            continue
        try:
            renderer = _make_renderer(name, tokenizer, options, variables)
            found = RendererFormat(name, renderer, tokenizer, variables)
            if all(np.array_equal(found.ids(*probe), ids) for probe, ids in zip(probes, expected, strict=True)):
                return name
        except Exception:  # a family whose special tokens the tokenizer lacks; every one has errors of its own
            continue
    return ""


class NamedTokenizer:
    """Tokenizer as the package expects it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._short_ids = lru_cache(_MOST_TEXTS)(tokenizer.encode)
        self.name_or_path = str(tokenizer.folder)
        self.unk_token_id = tokenizer.unknown_token_id
        self.eos_token_id = next(iter(tokenizer.eos_token_ids), None)

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        # Renderers tokenize the headers of a format again in every call, and its system message in every session.
        encode = self._short_ids if len(text) < MOST_CHARACTERS else self._tokenizer.encode_aside
        ids: list[int] = encode(text).tolist()
        return ids

    def decode(self, token_ids: Any, *args: Any, skip_special_tokens: bool = False, **kwargs: Any) -> str:
        return self._tokenizer.decode(token_ids, special_tokens=not skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        find = self._tokenizer.token_id
        return find(tokens) if isinstance(tokens, str) else [find(token) for token in tokens]


def _answer_message(
    content: str, reasoning: str, parsed: "Sequence[ParsedToolCall]", context_ids: Int32Array
) -> AnswerMessage:
    calls: list[Mapping[str, Any]] = []
    invalid: list[Mapping[str, Any]] = []
    context = context_ids.tobytes()
    for index, call in enumerate(parsed):
        problem = str(call.status) if call.status != "ok" else _problem_of(call)
        if problem:
            invalid.append({"name": call.name, "args": call.raw, "error": problem})
            continue
        # The same answer to the same context has the same ids, also after a crash of the service.
        digest = hashlib.blake2b(f"{index} {call.raw}".encode() + context, digest_size=12).hexdigest()
        own_id = call.id if call.id not in {known["id"] for known in calls} else None
        arguments = json.dumps(call.arguments or {}, ensure_ascii=False)
        function = {"name": call.name, "arguments": arguments}
        calls.append({"id": own_id or f"call_{digest}", "type": "function", "function": function})
    return AnswerMessage(
        content=content.strip(), reasoning=reasoning.strip(), tool_calls=calls, invalid_tool_calls=invalid
    )


def _problem_of(call: "ParsedToolCall") -> str:
    """Return why a parsed call is none that a client can read and send back, or an empty text."""
    if not isinstance(call.name, str) or not call.name:
        return "missing_name"
    if not isinstance(call.arguments or {}, dict):
        return "arguments_no_object"
    try:
        json.dumps([call.name, call.arguments, call.raw], allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # NaN, half a character, nested too deeply
        return "arguments_no_json"
    return ""


def _line(message: Message) -> str:
    """Return one line of a transcript; an answer is known by its text and its calls, whatever a client adds."""
    if message["role"] != "assistant":
        return f"{_json(message)}\n"
    calls = [
        [call["function"]["name"], _plain(call["function"]["arguments"])] for call in message.get("tool_calls", ())
    ]
    return f"{_json({'role': 'assistant', 'content': message['content'].strip(), 'tool_calls': calls})}\n"


def _answer_line(said: AnswerMessage) -> str:
    return _line({"role": "assistant", "content": said.content, "tool_calls": said.tool_calls})


def _plain(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


_json = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
