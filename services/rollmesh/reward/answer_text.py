"""Text of a response that its verifier reads: what follows the thought of a model that thinks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rollmesh.errors import DataError
from rollmesh.tasks.verifiers.extraction import OPENING_TAG, answer_after, without_own_thought
from rollmesh.tasks.verifiers.verifier_registry import reads_answers
from rollmesh.text import Tokenizer
from rollmesh.wire.reward_messages import ScoreItem


def answer_marker(tokenizer: Tokenizer, given: str | None, template_variables: Mapping[str, Any]) -> str | None:
    """Return ``reward.answer_after``, or without it the end of the thought that the chat template opens.

    None if it opens none: a response may then still begin with a thought of its own.
    """
    if given is not None:
        return given
    try:
        prompt = tokenizer.chat_text([{"role": "user", "content": "1"}], variables=template_variables)
    except DataError:  # no template, or one that needs other messages
        return None
    opened = re.search(rf"{OPENING_TAG.pattern}\s*$", prompt, OPENING_TAG.flags)
    return f"{opened[1]}/{opened[2]}" if opened is not None else None


def answer_text(item: ScoreItem, tokenizer: Tokenizer, marker: str | None, verifier: str) -> str:
    """Return the part of a response that a verifier reads, without special tokens.

    It is what follows ``marker``, and all of the response for an empty one. For None it is what follows the thought
    with which the response begins, for a verifier that reads answers.
    """
    if marker == "" or (marker is None and not reads_answers(verifier)):
        return tokenizer.decode(item.response_ids)
    # Tags are special tokens of some tokenizers.
    response = tokenizer.decode(item.response_ids, special_tokens=True)
    if marker is None:
        return tokenizer.without_special_tokens(without_own_thought(response))
    prompt = tokenizer.decode(item.prompt.token_ids, special_tokens=True)
    return tokenizer.without_special_tokens(answer_after(response, marker, prompt))
