"""Chat format of a run's model: messages to tokens, and the tokens of an answer to the message that they say.

A renderer (package ``renderers``) knows the format of a model family by its tokens: it reads thoughts and tool calls
out of sampled ids, and appends a next turn to them without tokenizing them again. A family without one is written by
the chat template of the tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from rollmesh.chat_template import Message
from rollmesh.config import RunConfig
from rollmesh.config.services import AgentsConfig
from rollmesh.errors import ConfigError, DataError
from rollmesh.runtime.logging import get_logger
from rollmesh.text import Tokenizer
from rollmesh.types import Int32Array

if TYPE_CHECKING:
    from renderers import ParsedToolCall, Renderer

Tools = Sequence[Mapping[str, Any]]
_NO_NAME = ("auto", "template")
_MOST_FORMATS = 64
"""Number of formats, one for each choice of variables, that are kept."""

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
    """Calls that could not be parsed: name, args (their text) and error."""


class RendererFormat:
    """Format that a renderer knows; a conversation is compared message by message, and its tokens are appended to."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    def transcript(self, messages: Sequence[Message], tools: Tools) -> str:
        """Return a conversation as lines of JSON: its tools and then its messages, without the thoughts of answers."""
        return f"{_json(list(tools))}\n{''.join(map(_line, messages))}"

    def answer_line(self, context_ids: Int32Array, answer_ids: Int32Array, tools: Tools) -> str:
        """Return the line of an answer in the transcript of a later call."""
        said = self.message(context_ids, answer_ids.tolist(), tools)
        return _line({"role": "assistant", "content": said.content, "tool_calls": said.tool_calls})

    def ids(self, messages: Sequence[Message], tools: Tools) -> Int32Array:
        """Return the tokens of a conversation and of the beginning of an answer; DataError for refused messages."""
        given: Any = [dict(message) for message in messages]
        try:
            ids = self._renderer.render_ids(given, tools=list(tools) or None, add_generation_prompt=True)
        except Exception as error:  # every family refuses messages with errors of its own
            raise DataError(f"the renderer of the model refuses the messages: {error}") from error
        return np.array(ids, np.int32)

    def next_ids(
        self, context_ids: Int32Array, answer_ids: Int32Array, messages: Sequence[Message], new: int, tools: Tools
    ) -> Int32Array | None:
        """Return the tokens of the last ``new`` messages after an answer; None if they do not continue its tokens.

        They do not where the format drops the thoughts of earlier turns.
        """
        added: Any = [dict(message) for message in messages[len(messages) - new :]]
        bridged = self._renderer.bridge_to_next_turn(
            context_ids.tolist(), answer_ids.tolist(), added, tools=list(tools) or None
        )
        ids = self.ids(messages, tools) if bridged is None else np.array(bridged.token_ids, np.int32)
        known = np.concatenate([context_ids, answer_ids])
        return ids[len(known) :] if np.array_equal(ids[: len(known)], known) else None

    def message(self, context_ids: Int32Array, answer_ids: Sequence[int], tools: Tools) -> AnswerMessage:
        """Read the message of an answer, which may be incomplete."""
        parsed = self._renderer.parse_response(
            list(answer_ids), tools=list(tools) or None, prompt_ids=context_ids.tolist()
        )
        return _answer_message(parsed.content, parsed.reasoning_content or "", parsed.tool_calls, context_ids)


def read_calls(tokenizer: Tokenizer, parser: str, context_ids: Int32Array, answer_ids: Sequence[int]) -> AnswerMessage:
    """Read the tool calls of an answer in a format without a renderer; a thought stays in the content."""
    from renderers.parsers import get_tool_parser

    content_ids, calls = get_tool_parser(parser, NamedTokenizer(tokenizer)).extract(list(answer_ids))
    return _answer_message(tokenizer.decode(content_ids), "", calls, context_ids)


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
        _check_named(config.agents, tokenizer, self._variables)
        self._renderer = "" if config.agents.renderer == "template" else config.agents.renderer
        if self._renderer == "auto":
            self._renderer = _matching_renderer(tokenizer, self._options, self._variables) if _is_installed() else ""
        get_logger("agents").info("chat_format", renderer=self._renderer or "none: the tokenizer's chat template")

    def renderer_format(self, added: Mapping[str, Any]) -> RendererFormat | None:
        """Return the renderer's format with the variables of a call, or None; DataError for unknown variables."""
        if not self._renderer:
            return None
        variables = {**self._variables, **added}
        key = _json(variables)
        if key not in self._formats:
            if len(self._formats) >= _MOST_FORMATS:
                self._formats.clear()
            try:
                self._formats[key] = RendererFormat(
                    _make_renderer(self._renderer, self.tokenizer, self._options, variables)
                )
            except Exception as error:  # the package raises its own and pydantic's errors
                raise DataError(f"chat_template_kwargs: the renderer {self._renderer} refuses them: {error}") from error
        return self._formats[key]


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
) -> Renderer:
    from renderers import config_from_name, create_renderer

    config: Any = type(config_from_name(name))(**options)
    return create_renderer(NamedTokenizer(tokenizer), config, chat_template_kwargs=variables)


def _check_named(config: AgentsConfig, tokenizer: Tokenizer, variables: Mapping[str, Any]) -> None:
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
    """Return the renderer that writes a probe of all roles as the chat template does, or an empty text."""
    if not tokenizer.has_chat_template:
        return ""
    try:
        text = tokenizer.chat_text(_PROBE, variables=variables, tools=_PROBE_TOOLS)
    except DataError:
        return ""
    expected = tokenizer.encode(text)
    for name in _known_renderers():
        try:
            renderer = _make_renderer(name, tokenizer, options, variables)
            written = RendererFormat(renderer).ids(_PROBE, _PROBE_TOOLS)
        except Exception:  # a family whose special tokens the tokenizer lacks; every one has errors of its own
            continue
        if np.array_equal(written, expected):
            return name
    return ""


class NamedTokenizer:
    """Tokenizer as the package expects it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.name_or_path = str(tokenizer.folder)
        self.unk_token_id = tokenizer.unknown_token_id
        self.eos_token_id = next(iter(tokenizer.eos_token_ids), None)

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        ids: list[int] = self._tokenizer.encode_aside(text).tolist()
        return ids

    def decode(self, token_ids: Any, *args: Any, skip_special_tokens: bool = False, **kwargs: Any) -> str:
        return self._tokenizer.decode(token_ids, special_tokens=not skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        find = self._tokenizer.token_id
        return find(tokens) if isinstance(tokens, str) else [find(token) for token in tokens]


def _answer_message(
    content: str, reasoning: str, parsed: Sequence[ParsedToolCall], context_ids: Int32Array
) -> AnswerMessage:
    calls: list[Mapping[str, Any]] = []
    invalid: list[Mapping[str, Any]] = []
    context = context_ids.tobytes()
    for index, call in enumerate(parsed):
        if call.status != "ok" or not call.name:
            invalid.append({"name": call.name, "args": call.raw, "error": str(call.status)})
            continue
        # The same answer to the same context has the same ids, also after a crash of the service.
        digest = hashlib.blake2b(f"{index} {call.raw}".encode() + context, digest_size=12).hexdigest()
        arguments = call.arguments or {}
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append(
            {
                "id": call.id or f"call_{digest}",
                "type": "function",
                "function": {"name": call.name, "arguments": arguments},
            }
        )
    return AnswerMessage(content=content, reasoning=reasoning, tool_calls=calls, invalid_tool_calls=invalid)


def _line(message: Message) -> str:
    """Return one line of a transcript; an answer is known by its text and its calls, whatever a client adds."""
    if message["role"] != "assistant":
        return f"{_json(message)}\n"
    calls = [
        [call["function"]["name"], _plain(call["function"]["arguments"])] for call in message.get("tool_calls", ())
    ]
    return f"{_json({'role': 'assistant', 'content': message['content'].strip(), 'tool_calls': calls})}\n"


def _plain(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
