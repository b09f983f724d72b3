"""JSON of answers in the Responses API: a response with its output items, and the events of a stream."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from rollmesh.agents.answer_stream import Delta, TokenLogprob
from rollmesh.agents.openai_answers import AnswerFormat, Choice
from rollmesh.agents.openai_errors import OpenAiError
from rollmesh.agents.responses_requests import ResponsesRequest

Event = dict[str, Any]
_ID_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


class OutputItems:
    """Output of one answer, built from the parts of its message, with an event for each change."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open = False
        """True while the last item may grow."""
        self._count = 0

    def add(self, answer_id: str, parts: Mapping[str, Any]) -> list[Event]:
        """Append parts of a chat message: reasoning_content, content and tool_calls."""
        events: list[Event] = []
        for kind, name in (("reasoning", "reasoning_content"), ("message", "content")):
            if text := parts.get(name):
                events += self._grow(answer_id, kind, text)
        for call in parts.get("tool_calls", ()):
            events += [*self.close(), *self._called(answer_id, call)]
        return events

    def end(self, answer_id: str, status: str) -> list[Event]:
        """Finish the last item; an answer without any is an empty message, which a client can send back."""
        events = [] if self.items else self._begin(answer_id, "message")
        return [*events, *self.close(status)]

    def close(self, status: str = "completed") -> list[Event]:
        """Finish the last item if it may still grow."""
        if not self._open:
            return []
        self._open = False
        item = self.items[-1]
        item["status"] = status
        (part,) = item["content"]
        place = {**self._place(), "content_index": 0}
        return [
            {"type": f"response.{part['type']}.done", **place, **_logprobs(part), "text": part["text"]},
            {"type": "response.content_part.done", **place, "part": part},
            {"type": "response.output_item.done", "output_index": place["output_index"], "item": item},
        ]

    def numbered(self, events: Sequence[Event]) -> bytes:
        """Return events of the stream, each with its number."""
        lines = []
        for event in events:
            data = json.dumps({**event, "sequence_number": self._count}, ensure_ascii=False, separators=(",", ":"))
            lines.append(f"event: {event['type']}\ndata: {data}\n\n")
            self._count += 1
        return "".join(lines).encode()

    def _grow(self, answer_id: str, kind: str, text: str) -> list[Event]:
        events: list[Event] = []
        if not self._open or self.items[-1]["type"] != kind:
            events = [*self.close(), *self._begin(answer_id, kind)]
        (part,) = self.items[-1]["content"]
        part["text"] += text
        delta = {"content_index": 0, **_logprobs(part), "delta": text}
        return [*events, {"type": f"response.{part['type']}.delta", **self._place(), **delta}]

    def _begin(self, answer_id: str, kind: str) -> list[Event]:
        head: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item = self._new(answer_id, kind, **head, content=[])
        added = {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item)}
        item["content"] = [part]
        self._open = True
        return [
            added,
            {"type": "response.content_part.added", **self._place(), "content_index": 0, "part": dict(part)},
        ]

    def _called(self, answer_id: str, call: Mapping[str, Any]) -> list[Event]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        item = self._new(answer_id, "function_call", call_id=call["id"], name=name, arguments="")
        added = {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item)}
        item |= {"arguments": arguments, "status": "completed"}
        place = self._place()
        return [
            added,
            {"type": "response.function_call_arguments.delta", **place, "delta": arguments},
            {"type": "response.function_call_arguments.done", **place, "name": name, "arguments": arguments},
            {"type": "response.output_item.done", "output_index": place["output_index"], "item": item},
        ]

    def _new(self, answer_id: str, kind: str, **fields: Any) -> dict[str, Any]:
        item_id = f"{_ID_PREFIXES[kind]}_{answer_id.partition('_')[2]}_{len(self.items)}"
        item = {"id": item_id, "type": kind, "status": "in_progress", **fields}
        self.items.append(item)
        return item

    def _place(self) -> Event:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFormat(AnswerFormat):
    """Format of a response and its events."""

    request: ResponsesRequest
    output: OutputItems = field(default_factory=OutputItems)
    unread_calls: list[Mapping[str, Any]] = field(default_factory=list)
    """Calls of the answer that the client does not get as such."""

    def whole(self, choices: Sequence[Choice], extra: Mapping[str, Any]) -> dict[str, Any]:
        (choice,) = choices
        ids = [token.token_id for token in choice.tokens]
        final = Delta(text=choice.text, token_ids=ids, finish_reason=choice.finish_reason)
        self._add(final, Choice(message=choice.message))
        self.output.end(self.answer_id, _status(choice))
        return self._final(choice, extra)

    def first(self, index: int) -> bytes:
        response = self._response("in_progress", {})
        kinds = ("response.created", "response.in_progress")
        return self.output.numbered([{"type": kind, "response": response} for kind in kinds])

    def piece(self, index: int, delta: Delta, before: Choice, extra: Mapping[str, Any]) -> bytes:
        return self.output.numbered(self._add(delta, before))

    def last(self, choices: Sequence[Choice], extra: Mapping[str, Any]) -> bytes:
        (choice,) = choices
        events = self.output.end(self.answer_id, _status(choice))
        final = {"type": f"response.{_status(choice)}", "response": self._final(choice, extra)}
        return self.output.numbered([*events, final])

    def failed(self, error: OpenAiError) -> bytes:
        fields = {"code": error.code or error.kind, "message": str(error), "param": error.param}
        response = self._response("failed", {}) | {"error": fields}
        return self.output.numbered([{"type": "response.failed", "response": response}])

    def _add(self, delta: Delta, before: Choice) -> list[Event]:
        parts = self.news(delta, before)
        self.unread_calls.extend(parts.get("invalid_tool_calls", ()))
        return self.output.add(self.answer_id, parts)

    def _final(self, choice: Choice, extra: Mapping[str, Any]) -> dict[str, Any]:
        body = self._response(_status(choice), extra)
        if choice.finish_reason == "length":
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        usage = self.usage([choice])
        body["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._thought_tokens(choice.tokens)},
            "total_tokens": usage["total_tokens"],
        }
        if self.unread_calls:
            body["invalid_tool_calls"] = self.unread_calls
        if self.token_ids:
            body |= {
                "prompt_token_ids": self.contexts[0].tolist(),
                "token_ids": [token.token_id for token in choice.tokens],
            }
        return body

    def _response(self, status: str, extra: Mapping[str, Any]) -> dict[str, Any]:
        asked = self.request
        return {
            "id": self.answer_id,
            "object": "response",
            "created_at": self.created,
            "model": self.model,
            "status": status,
            "output": [dict(item) for item in self.output.items],
            "usage": None,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": asked.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in asked.tools],
            "top_p": asked.top_p,
            "truncation": "disabled",
            "rollmesh": dict(extra),
        }

    def _thought_tokens(self, tokens: Sequence[TokenLogprob]) -> int:
        """Return the number of tokens up to the end of the answer's thought."""
        thought = "".join(item["content"][0]["text"] for item in self.output.items if item["type"] == "reasoning")
        at = "".join(token.token for token in tokens).find(thought) if thought else -1
        starts = accumulate((len(token.token) for token in tokens), initial=0)
        return 0 if at < 0 else sum(start < at + len(thought) for start, _ in zip(starts, tokens, strict=False))


def _status(choice: Choice) -> str:
    return "incomplete" if choice.finish_reason == "length" else "completed"


def _logprobs(part: Mapping[str, Any]) -> Event:
    return {"logprobs": []} if part["type"] == "output_text" else {}
