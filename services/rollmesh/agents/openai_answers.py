"""JSON of answers: whole ones, and the events of a stream."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rollmesh.agents.answer_stream import Delta, TokenLogprob
from rollmesh.agents.chat_format import AnswerMessage
from rollmesh.agents.openai_errors import OpenAiError
from rollmesh.types import Int32Array

DONE = b"data: [DONE]\n\n"

_READS = 16
"""A streamed message is read again when a sixteenth of its tokens is new."""
Endpoint = Literal["chat", "completions", "generate", "responses"]
_KINDS: dict[Endpoint, str] = {"chat": "chat.completion", "completions": "text_completion", "generate": "generate"}


@dataclass(slots=True, kw_only=True)
class MessageSoFar:
    """Parts of an answer's message that are sent: what is sent never changes."""

    text: dict[str, str] = field(default_factory=dict)
    calls: int = 0
    tokens_read: int = 0
    whole: AnswerMessage | None = None
    """The message, once it is complete."""

    def news(
        self, read: Callable[[Sequence[int]], AnswerMessage], ids: Sequence[int], *, final: bool
    ) -> dict[str, Any]:
        """Return the parts that are new since the last call: content, reasoning_content, tool_calls.

        Reading begins at the first token each time, so a long answer is read at growing intervals.
        """
        if not final and len(ids) - self.tokens_read < 1 + len(ids) // _READS:
            return {}
        self.tokens_read = len(ids)
        said, parts = read(ids), dict[str, Any]()
        self.whole = said if final else None
        for name, text in (("reasoning_content", said.reasoning), ("content", said.content)):
            sent = self.text.get(name, "")
            now = text if final else text.removesuffix("\ufffd").rstrip()
            if now.startswith(sent) and len(now) > len(sent):
                parts[name] = now[len(sent) :]
                self.text[name] = now
        if new := said.tool_calls[self.calls :]:
            parts["tool_calls"] = [{"index": self.calls + at, **call} for at, call in enumerate(new)]
            self.calls += len(new)
        if final and said.invalid_tool_calls:
            parts["invalid_tool_calls"] = list(said.invalid_tool_calls)
        return parts

    def finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self.calls else reason


@dataclass(slots=True, kw_only=True)
class Choice:
    """One answer, as far as it has arrived."""

    text: str = ""
    tokens: list[TokenLogprob] = field(default_factory=list)
    character_count: int = 0
    """Length of the text of its tokens; not of ``text``, which lacks special tokens and is sent before its tokens while
    a stop string may be beginning."""
    finish_reason: str | None = None
    message: MessageSoFar = field(default_factory=MessageSoFar)
    cached_token_count: int = 0

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.tokens += delta.logprobs
        self.character_count += sum(len(token.token) for token in delta.logprobs)
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.cached_token_count = delta.cached_token_count


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """Format of one call's answers, and the fields common to all its events."""

    endpoint: Endpoint
    answer_id: str
    created: int
    """Creation time in Unix seconds."""
    model: str
    logprobs: bool
    token_ids: bool
    contexts: Sequence[Int32Array]
    """Token ids of each prompt's context."""
    choices_per_context: int = 1
    """Answers to each prompt."""
    read: Callable[[Sequence[int]], AnswerMessage] | None = None
    """Message that the tokens of an answer say; None if it is their text."""
    streams: bool = True
    """False if the message of a part may differ from that of the whole: it is sent at the end."""
    sends_usage: bool = False
    """True if a stream ends with the token counts."""

    def whole(self, choices: Sequence[Choice], extra: Mapping[str, Any]) -> dict[str, Any]:
        body = self._head(_KINDS[self.endpoint], extra)
        body["choices"] = [self._choice(index, choice) for index, choice in enumerate(choices)]
        body["usage"] = self.usage(choices)
        if self.token_ids:
            contexts = [context.tolist() for context in self.contexts]
            body["prompt_token_ids"] = contexts[0] if len(contexts) == 1 else contexts
        return body

    def first(self, index: int) -> bytes:
        """Return the first event of a streamed answer, if any: the role in chat, the ids of its context if wanted."""
        if self.endpoint == "completions" and not self.token_ids:
            return b""
        choice: dict[str, Any] = {"index": index, "finish_reason": None}
        if self.endpoint == "chat":
            choice["delta"] = {"role": "assistant", "content": "" if self.read is None else None}
        else:
            choice |= {"text": "", "logprobs": None}
        if not self.token_ids:
            return self._event(choice)
        choice["token_ids"] = []
        context = self.contexts[index // self.choices_per_context].tolist()
        return self._event(choice, prompt_token_ids=context)

    def piece(self, index: int, delta: Delta, before: Choice, extra: Mapping[str, Any]) -> bytes:
        """Return one event of a streamed answer; ``before`` is the answer without it."""
        choice: dict[str, Any] = {"index": index, "finish_reason": delta.finish_reason}
        if self.read is not None or self.endpoint == "chat":
            choice["delta"] = self.news(delta, before)
            choice["finish_reason"] = before.message.finish_reason(delta.finish_reason)
        else:
            choice["text"] = delta.text
        choice["logprobs"] = self._logprobs(delta.logprobs, before.character_count)
        if self.token_ids:
            choice["token_ids"] = list(delta.token_ids)
        return self._event(choice, extra)

    def news(self, delta: Delta, before: Choice) -> dict[str, Any]:
        """Return the new parts of a message; ``before`` is the answer without them."""
        if self.read is None:
            return {"content": delta.text} if delta.text or not delta.finish_reason else {}
        final = delta.finish_reason is not None
        if not final and not self.streams:
            return {}
        ids = [*(token.token_id for token in before.tokens), *delta.token_ids]
        return before.message.news(self.read, ids, final=final)

    def last(self, choices: Sequence[Choice], extra: Mapping[str, Any]) -> bytes:
        """Return the end of a stream, with the token counts if they are wanted."""
        if not self.sends_usage:
            return DONE
        body = self._head(self._chunk_kind, extra)
        body["choices"] = []
        body["usage"] = self.usage(choices)
        return event_line(body) + DONE

    def failed(self, error: OpenAiError) -> bytes:
        """Return the end of a stream whose answer has failed."""
        return event_line(error.body)

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        context, answers = sum(map(len, self.contexts)), sum(len(choice.tokens) for choice in choices)
        # Each context counts once, as its first answer found it: the others copy from that one.
        cached = sum(choice.cached_token_count for choice in choices[:: self.choices_per_context])
        return {
            "prompt_tokens": context,
            "completion_tokens": answers,
            "total_tokens": context + answers,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.endpoint == "chat" else "text_completion"

    def _head(self, kind: str, extra: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
            "rollmesh": dict(extra),
        }

    def _event(self, choice: dict[str, Any], extra: Mapping[str, Any] | None = None, **fields: Any) -> bytes:
        body = self._head(self._chunk_kind, extra or {}) | fields
        body["choices"] = [choice]
        return event_line(body)

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        body: dict[str, Any] = {"index": index, "finish_reason": choice.finish_reason}
        if self.read is not None:
            said = choice.message.news(self.read, [token.token_id for token in choice.tokens], final=True)
            if calls := said.get("tool_calls"):
                said["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in calls]
            content = None if "tool_calls" in said else ""
            body["message"] = {"role": "assistant", "content": content, "refusal": None, **said}
            body["finish_reason"] = choice.message.finish_reason(choice.finish_reason)
        elif self.endpoint == "chat":
            body["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
        elif self.endpoint == "completions":
            body["text"] = choice.text
        body["logprobs"] = self._logprobs(choice.tokens, 0)
        if self.token_ids:
            body["token_ids"] = [t.token_id for t in choice.tokens]
        return body

    def _logprobs(self, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        if self.endpoint == "chat":
            content = [
                {"token": t.token, "logprob": t.logprob, "bytes": list(t.token.encode()), "top_logprobs": []}
                for t in tokens
            ]
            return {"content": content, "refusal": None}
        if self.endpoint == "generate":
            return {"content": [{"token": f"token_id:{t.token_id}", "logprob": t.logprob} for t in tokens]}
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token.token)
        return {
            "tokens": [t.token for t in tokens],
            "token_logprobs": [t.logprob for t in tokens],
            "top_logprobs": None,
            "text_offset": offsets,
        }


def event_line(body: Mapping[str, Any]) -> bytes:
    """Return one event of a stream."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
