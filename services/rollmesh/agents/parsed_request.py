"""Parsing of a call: policy version, context, sampling parameters, and the limits inside a session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rollmesh.agents.context_match import Context
from rollmesh.agents.openai_errors import OpenAiError, invalid
from rollmesh.agents.openai_requests import ChatRequest, CompletionRequest, SamplingRequest
from rollmesh.config import RunConfig
from rollmesh.errors import DataError
from rollmesh.text import Tokenizer
from rollmesh.types import Int32Array, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """One call, parsed and checked."""

    context: Context
    field: str
    """Request field of the context: messages or prompt."""
    whole_ids: Callable[[], Int32Array]
    """Tokens of the whole context, used if none of it is recorded."""
    other_ids: Callable[[], Int32Array] | None = None
    """The same without the tokens that the tokenizer adds around a text; None if it adds none."""
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
    request: ChatRequest | CompletionRequest, config: RunConfig, tokenizer: Tokenizer, index: int = 0
) -> ParsedRequest:
    """Parse a call with the prompt at ``index``; the OpenAiError of an invalid one names the field."""
    plain: Callable[[], Int32Array] | None = None
    if isinstance(request, ChatRequest):
        text = _rendered(request, config, tokenizer)
        context = Context(text=text)
        whole = _encoder(tokenizer, text, special_tokens=False, field="messages")
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
        field="messages" if isinstance(request, ChatRequest) else "prompt",
        whole_ids=whole,
        other_ids=plain,
        choices=request.n or 1,
        stops=request.stops,
        token_limit=request.token_limit,
        params=SamplingParams(
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=max(request.top_k or 0, 0),
            seed=0 if request.seed is None else request.seed % 2**63,
            stop_token_ids=tokenizer.eos_token_ids,
        ),
        pinned_version=read_model(request.model, config.name),
        seeded=request.seed is not None,
    )


def too_long(tokens: int, most: int, field: str) -> OpenAiError:
    """Return the error for a context that leaves no room for an answer."""
    return invalid(
        f"the context has {tokens} tokens; the limit with the answer is generator.max_context_tokens={most}",
        field,
        "context_length_exceeded",
    )


def check_recordable(request: SamplingRequest, config: RunConfig) -> None:
    """Raise OpenAiError for fields that a session does not support: its tokens must come from the policy as trained."""
    temperature = config.rollout.temperature
    if "@" in request.model:
        raise invalid(
            f"model: a session samples from the newest policy; send {config.name!r}, or omit the session header",
            "model",
        )
    if request.temperature is not None and request.temperature != temperature:
        raise invalid(
            f"temperature: {request.temperature:g} in a session, but the run trains at rollout.temperature="
            f"{temperature:g}; omit it or send {temperature:g}",
            "temperature",
        )
    for name, value, off in (("top_p", request.top_p, 1.0), ("top_k", max(request.top_k or 0, 0), 0)):
        if value not in (None, off):
            raise invalid(
                f"{name}: {value:g} in a session, whose tokens are trained on: they must be sampled from the full "
                f"vocabulary; omit it or send {off:g}",
                name,
            )
    if request.prompt_count > 1:
        raise invalid(
            f"prompt: {request.prompt_count} prompts in a session, which has a single conversation; send one, or omit "
            "the session header",
            "prompt",
        )
    if request.n not in (None, 1):
        raise invalid(f"n: {request.n} in a session, which has a single conversation; open one session per answer", "n")
    if request.seed is not None:
        raise invalid("seed: not supported in a session, which samples with the run's seed; omit it", "seed")


def _rendered(request: ChatRequest, config: RunConfig, tokenizer: Tokenizer) -> str:
    """Render the messages with the variables of the run and of the request, which take precedence."""
    added = request.chat_template_kwargs or {}
    try:
        tokenizer.check_template_variables(added, "chat_template_kwargs")
    except DataError as error:
        raise invalid(str(error), "chat_template_kwargs") from error
    try:
        variables = {**config.data.chat_template_kwargs, **added}
        return tokenizer.chat_text([m.as_template() for m in request.messages], variables=variables)
    except DataError as error:
        fields = "messages and chat_template_kwargs" if added else "messages"
        raise invalid(f"{fields}: {error}", "messages") from error


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
