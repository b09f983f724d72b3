"""Text of a response that its verifier reads: what follows the thought of a model that thinks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rollmesh.errors import DataError
from rollmesh.tasks.verifiers.extraction import answer_after
from rollmesh.text import Tokenizer
from rollmesh.wire.reward_messages import ScoreItem

_OPENED_THOUGHT = re.compile(
    r"([<\[\u25c1])((?:\w+:)?(?:think|thinking|thought|reasoning)[>\]\u25b7])\s*$", re.IGNORECASE
)
"""``<think>``, ``<seed:think>``, ``[THINK]``, and that of Kimi, between triangles."""


def answer_marker(tokenizer: Tokenizer, given: str | None, template_variables: Mapping[str, Any]) -> str:
    """Return ``reward.answer_after``, or without it the end of the thought that the chat template opens, if it does."""
    if given is not None:
        return given
    try:
        prompt = tokenizer.chat_text([{"role": "user", "content": "1"}], variables=template_variables)
    except DataError:  # no template, or one that needs other messages
        return ""
    opened = _OPENED_THOUGHT.search(prompt)
    return f"{opened[1]}/{opened[2]}" if opened is not None else ""


def answer_text(item: ScoreItem, tokenizer: Tokenizer, marker: str) -> str:
    """Return what follows ``marker`` in a response, or all of it for an empty marker, without special tokens."""
    if not marker:
        return tokenizer.decode(item.response_ids)
    # Tags are special tokens of some tokenizers.
    prompt = tokenizer.decode(item.prompt.token_ids, special_tokens=True)
    response = tokenizer.decode(item.response_ids, special_tokens=True)
    return tokenizer.without_special_tokens(answer_after(response, marker, prompt))
