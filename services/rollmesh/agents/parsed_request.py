"""Parsing of a call: policy version, context, sampling parameters, and the limits inside a session."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from rollmesh.agents.chat_format import AnswerMessage, ChatFormats, RendererFormat, read_calls
from rollmesh.agents.context_match import Context
from rollmesh.agents.openai_errors import OpenAiError, context_full, invalid
from rollmesh.agents.openai_requests import ChatRequest, CompletionRequest, SamplingRequest
from rollmesh.chat_template import Message
from rollmesh.config import RunConfig
from rollmesh.errors import DataError
from rollmesh.text import Tokenizer
from rollmesh.types import Int32Array, SamplingParams

Read = Callable[[Int32Array, Sequence[int]], AnswerMessage]
"""Read the message of an answer from the tokens of its context and its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """One call, parsed and checked."""

    context: Context
    field: str
    """Request field of the context: messages, input or prompt."""
    whole_ids: Callable[[], Int32Array]
    """Tokens of the whole context, used if none of it is recorded."""
    other_ids: Callable[[], Int32Array] | None = None
    """The same without the tokens that the tokenizer adds around a text; None if it adds none."""
    written: Callable[[Int32Array, Int32Array, AnswerMessage | None], Iterable[str]] | None
    """Texts that a recorded answer may have in the context of a later call, from its context, its tokens and the
    message that the client got, if known; None if it is the text of its tokens."""
    next_ids: Callable[[str, Int32Array, Int32Array], Int32Array | None]
    """Tokens of the context's end, given as text, after a recorded context and the answer to it; None if they do not
    continue these tokens."""
    read: Read | None
    """Message that the tokens of an answer to a context say; None if it is their text."""
    streams: bool
    """True if the message of a part of an answer is a part of its message."""
    texts: bool = True
    """False if the ids of the answer's tokens are enough: its message is read from them when it is complete."""
    choices: int
    stops: tuple[str, ...]
    token_limit: int | None
    params: SamplingParams
    pinned_version: int | None
    seeded: bool


def read_model(name: str, run: str) -> int | None:
    """Return the policy version that a model name pins, or None for the newest; OpenAiError for another run's name."""
    base, at, version = name.partition("@")
    if base != run:
        raise _no_model(f"model: {name!r} is not served here; it is {run!r}, or {run}@VERSION")
    if not at:
        return None
    if not version.isdecimal() or len(version) > 15:
        raise _no_model(f"model: {name!r}: the policy version after @ must be a whole number")
    return int(version)


def parse_request(
    request: ChatRequest | CompletionRequest, config: RunConfig, formats: ChatFormats, index: int = 0
) -> ParsedRequest:
    """Parse a call with the prompt at ``index``; the OpenAiError of an invalid one names the field."""
    tokenizer, streams = formats.tokenizer, True
    plain: Callable[[], Int32Array] | None = None
    written: Callable[[Int32Array, Int32Array, AnswerMessage | None], Iterable[str]] | None = None
    read: Read | None = None

    def next_ids(rest: str, context_ids: Int32Array, answer_ids: Int32Array) -> Int32Array | None:
        return tokenizer.encode_aside(rest)

    if isinstance(request, ChatRequest):
        chat = _Chat(request, config, formats)
        context, whole, read = Context(text=chat.text), chat.whole_ids, chat.read
        streams = chat.format is not None and chat.format.streams
        if chat.format is not None:
            written, next_ids = chat.written, chat.next_ids
    elif isinstance(prompt := request.prompts[index], str):
        context = Context(text=prompt)
        whole = _encoder(tokenizer, prompt, special_tokens=True, field="prompt")
        plain = _encoder(tokenizer, prompt, special_tokens=False, field="prompt")
    else:
        ids = _ids(prompt, tokenizer, config.generator.max_context_tokens)
        context = Context(text=tokenizer.decode(ids, special_tokens=True), token_ids=ids)

        def whole() -> Int32Array:
            return ids

    return ParsedRequest(
        context=context,
        field=request.context_field,
        whole_ids=whole,
        other_ids=plain,
        written=written,
        next_ids=next_ids,
        read=read,
        streams=streams,
        texts=read is None or request.needs_texts,
        choices=request.n or 1,
        stops=request.stops,
        token_limit=request.token_limit,
        params=SamplingParams(
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=max(request.top_k or 0, 0),
            min_p=request.min_p or 0.0,
            seed=0 if request.seed is None else request.seed % 2**63,
            stop_token_ids=tokenizer.eos_token_ids,
        ),
        pinned_version=read_model(request.model, config.name),
        seeded=request.seed is not None,
    )


def too_long(tokens: int, most: int, field: str) -> OpenAiError:
    """Return the error for a context that leaves no room for an answer."""
    return context_full(f"generator.max_context_tokens={most} tokens with the answer, and this one has {tokens}", field)


def check_recordable(request: SamplingRequest, config: RunConfig) -> None:
    """Raise OpenAiError for fields that a session does not support: its tokens must come from the policy as trained."""
    if "@" in request.model:
        raise invalid(
            f"model: a session samples from the newest policy; send {config.name!r}, or name no session",
            "model",
        )
    for name in ("temperature", "top_p", "top_k", "min_p"):
        value, trained = getattr(request, name), getattr(config.rollout, name)
        if value is not None and max(value, 0) != trained:
            raise invalid(
                f"{name}: {value:g} in a session, but the run trains at rollout.{name}={trained:g}; omit it or send "
                f"{trained:g}",
                name,
            )
    if request.prompt_count > 1:
        raise invalid(
            f"prompt: {request.prompt_count} prompts in a session, which has a single conversation; send one, "
            "or name no session",
            "prompt",
        )
    if request.n not in (None, 1):
        raise invalid(f"n: {request.n} in a session, which has a single conversation; open one session per answer", "n")
    if request.seed is not None:
        raise invalid("seed: not supported in a session, which samples with the run's seed; omit it", "seed")


_AS_SYSTEM = {"developer": "system"}


class _Chat:
    """Conversation of one call, in the format of the model.

    An answer that the messages begin is continued by the chat template: a renderer writes whole messages.
    """

    def __init__(self, request: ChatRequest, config: RunConfig, formats: ChatFormats) -> None:
        self._field = request.context_field
        self._messages: list[Message] = [message.as_template() for message in request.messages]
        self._tools = request.tool_specs
        self._tokenizer = formats.tokenizer
        added = request.chat_template_kwargs or {}
        begun = request.messages[-1].role == "assistant"
        self._parser = formats.tool_parser
        self._reads_calls = bool(self._tools) and request.tool_choice != "none"
        self._one_call = request.parallel_tool_calls is False
        self.format: RendererFormat | None = None
        try:
            self.format = None if begun else formats.renderer_format(added)
            if self.format is None:
                self._tokenizer.check_template_variables(added, "chat_template_kwargs")
        except DataError as error:
            raise invalid(str(error), "chat_template_kwargs") from error
        self.read = self._reader()
        if self.format is not None:
            self._messages = _for_renderer(self._messages, name_results=formats.names_results)
            try:
                self.text = self.format.transcript(self._messages, self._tools)
            except DataError as error:
                raise invalid(f"{self._field} and tools: {error}", self._field) from error
            return
        if begun and formats.renders and not formats.tokenizer.has_chat_template:
            raise invalid(
                f"{self._field}: an assistant message at the end is continued by the chat template, and this model has "
                "none",
                self._field,
            )
        if self._tools and formats.tool_parser is None:
            raise invalid(
                "tools: the tool calls of this model cannot be read, because no renderer knows its chat template; set "
                "agents.renderer or agents.tool_parser in the run file (docs/agents.md)",
                "tools",
                "unsupported_parameter",
            )
        try:
            variables = {**config.data.chat_template_kwargs, **added}
            self.text = self._tokenizer.chat_text(self._messages, variables=variables, tools=self._tools)
        except DataError as error:
            fields = f"{self._field} and chat_template_kwargs" if added else self._field
            raise invalid(f"{fields}: {error}", self._field) from error

    def whole_ids(self) -> Int32Array:
        """Return the tokens of the conversation and of the beginning of the answer."""
        try:
            if self.format is not None:
                return self.format.ids(self._messages, self._tools)
            return self._tokenizer.encode_aside(self.text)
        except DataError as error:
            raise invalid(f"{self._field}: {error}", self._field) from error

    def written(self, context_ids: Int32Array, answer_ids: Int32Array, said: AnswerMessage | None) -> Iterable[str]:
        """Return a recorded answer as the transcript of a later call may show it."""
        assert self.format is not None
        return self.format.answer_lines(context_ids, answer_ids, self._tools, said)

    def next_ids(self, rest: str, context_ids: Int32Array, answer_ids: Int32Array) -> Int32Array | None:
        """Return the tokens of the messages in ``rest``, the end of the transcript, or None."""
        assert self.format is not None
        return self.format.next_ids(context_ids, answer_ids, self._messages, rest.count("\n"), self._tools)

    def _reader(self) -> Read | None:
        tools, chosen, parser, reads = self._tools, self.format, self._parser, self._reads_calls
        read: Read
        if chosen is not None:
            read = partial(chosen.message, tools=tools, read_calls=reads)
        elif parser is not None and reads:
            read = partial(read_calls, self._tokenizer, parser)
        else:
            return None
        return (lambda context_ids, ids: read(context_ids, ids).with_one_call()) if self._one_call else read


def _for_renderer(messages: Sequence[Message], *, name_results: bool) -> list[Message]:
    """Return messages in the roles that renderers know, and results with the names of the functions called."""
    called: dict[str, str] = {}
    written: list[Message] = []
    for message in messages:
        called |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        added = {"role": _AS_SYSTEM.get(message["role"], message["role"])}
        if message["role"] == "tool" and name_results and message.get("tool_call_id") in called:
            added["name"] = called[message["tool_call_id"]]
        written.append({**message, **added})
    return written


def _no_model(message: str) -> OpenAiError:
    return OpenAiError(404, message, param="model", code="model_not_found")


def _encoder(tokenizer: Tokenizer, text: str, *, special_tokens: bool, field: str) -> Callable[[], Int32Array]:
    def encode() -> Int32Array:
        try:
            return tokenizer.encode_aside(text, special_tokens=special_tokens)
        except DataError as error:
            raise invalid(f"{field}: {error}", field) from error

    return encode


def _ids(prompt: list[int], tokenizer: Tokenizer, most: int) -> Int32Array:
    if len(prompt) > most:
        raise too_long(len(prompt), most, "prompt")
    for at, token_id in enumerate(prompt):
        if not 0 <= token_id < tokenizer.vocab_size:
            raise invalid(
                f"prompt[{at}]: token id {token_id} is outside the vocabulary [0, {tokenizer.vocab_size})", "prompt"
            )
    return np.array(prompt, np.int32)
