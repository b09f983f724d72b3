"""Chats as tokens, and which of them the assistant writes."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np

from rollmesh.agents.chat_format import answers_format
from rollmesh.chat_template import Message, Tools
from rollmesh.errors import DataError
from rollmesh.tasks.sources.rows import chat_messages, without_nulls
from rollmesh.tasks.verifiers.verifier_protocol import short_repr
from rollmesh.text import Tokenizer
from rollmesh.types import BoolArray, Int32Array

_ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatTokens:
    """Chats of one model, as its chat template writes them.

    Which tokens are the assistant's say the tags {% generation %} of the template, else the renderer that knows the
    family and writes the same tokens, else the spans that the template's renderings differ in.
    """

    def __init__(self, tokenizer: Tokenizer, variables: Mapping[str, Any]) -> None:
        """``variables`` are further ones of the chat template. Raises DataError for those that it does not read."""
        tokenizer.check_template_variables(variables, "chat_template_kwargs")
        self._tokenizer = tokenizer
        self._variables = variables
        self._format = None if tokenizer.marks_answers else answers_format(tokenizer, variables)

    def read(self, messages_value: Any, tools_value: Any) -> tuple[Int32Array, BoolArray]:
        """Return the tokens of a chat, and which are the assistant's: all its turns, each with its end token.

        Raises DataError with the number of a message that cannot be trained on.
        """
        messages, tools = _messages(messages_value), _tools(tools_value)
        text = self._tokenizer.conversation_text(messages, variables=self._variables, tools=tools)
        whole = self._tokenizer.encode(text)
        ids, mask = self._rendered(messages, tools, whole) or self._marked(messages, tools, text, whole)
        self._tokenizer.check_range(ids)
        self._check_turns(ids, mask, [at for at, message in enumerate(messages) if message["role"] == "assistant"])
        return ids, mask

    def _rendered(
        self, messages: Sequence[Message], tools: Tools, whole: Int32Array
    ) -> tuple[Int32Array, BoolArray] | None:
        """Ask the renderer; None if it refuses the chat or writes another than the template, but for a last end."""
        if self._format is None:
            return None
        with suppress(DataError):
            ids, mask = self._format.conversation(messages, tools or ())
            if np.array_equal(ids[: len(whole)], whole) and len(ids) <= len(whole) + 1:
                return ids, mask
        return None

    def _marked(
        self, messages: Sequence[Message], tools: Tools, text: str, ids: Int32Array
    ) -> tuple[Int32Array, BoolArray]:
        """Mark the tokens of the answers' spans. Raises DataError for a token that is in one only in part."""
        spans = self._tokenizer.answer_spans(messages, variables=self._variables, tools=tools)
        cuts = sorted({0, len(text), *chain.from_iterable(spans)})
        pieces = [self._tokenizer.encode(text[begin:stop]) for begin, stop in pairwise(cuts)]
        if np.array_equal(np.concatenate(pieces), ids):
            place = dict(zip(cuts, accumulate(map(len, pieces), initial=0), strict=True))
        else:  # a tokenizer that puts a space before every text, or a token across a cut
            place = {cut: self._place(text, ids, cut) for cut in cuts}
        mask = np.zeros(len(ids), np.bool_)
        for begin, stop in spans:
            mask[place[begin] : place[stop]] = True
            # A template may leave the end of a turn outside of its span.
            if place[stop] < len(ids) and not self._ends(ids[place[begin] : place[stop]]):
                mask[place[stop]] = self._ends(ids[place[stop] : place[stop] + 1])
        return ids, mask

    def _place(self, text: str, ids: Int32Array, cut: int) -> int:
        before = self._tokenizer.encode(text[:cut])
        if not np.array_equal(ids[: len(before)], before):
            raise DataError(
                f"one token is partly the assistant's, at {text[max(0, cut - 12) : cut + 12]!r}: where its text begins "
                "or ends cannot be found exactly; change the text there, or the chat template"
            )
        return len(before)

    def _ends(self, ids: Int32Array) -> bool:
        return bool(np.isin(ids, self._tokenizer.eos_token_ids).any())

    def _check_turns(self, ids: Int32Array, mask: BoolArray, turns: Sequence[int]) -> None:
        edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
        if len(edges) != len(turns):
            raise DataError(
                f"{len(edges)} parts of the text are marked as the assistant's, for {len(turns)} messages; put "
                f"{{% generation %}} around each in the chat template of {self._tokenizer.folder}"
            )
        for at, (begin, stop) in zip(turns, edges, strict=True):
            if not self._ends(ids[begin:stop]):
                raise DataError(
                    f"message {at} (role 'assistant') has no end token of the model, which would not learn to stop; "
                    "add the one that follows it to eos_token_id in generation_config.json"
                )


def _messages(value: Any) -> list[Message]:
    messages = chat_messages(value)
    if messages is None:
        raise DataError(f"expected a list of messages, got {short_repr(value)}")
    for at, message in enumerate(messages):
        if message["role"] not in _ROLES:
            raise DataError(f"message {at}: unknown role {message['role']!r}; known are {', '.join(_ROLES)}")
        if message["role"] == "assistant" and not message["content"].strip() and not message.get("tool_calls"):
            raise DataError(f"message {at} (role 'assistant') is empty: write its content or its tool_calls")
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError("no message of the role 'assistant', so nothing to train on; add one or leave out the row")
    return messages


def _tools(value: Any) -> Tools:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"the tools of the row are not JSON: {error}") from error
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise DataError(f"the tools of the row: expected a list of objects, got {short_repr(value)}")
    return [without_nulls(tool) for tool in value]
