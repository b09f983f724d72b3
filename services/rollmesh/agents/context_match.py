"""Comparison of a call's context with the recorded trajectory.

An agent sends its whole conversation with every call, as text. The model's own words in it are not tokenized again: the
text is compared with the recorded text, and where they agree the recorded ids are kept, exactly as sampled. Only the
text after them is new, and is tokenized once. If the texts differ (the agent edited its history, or the template
renders it differently), no recorded id can be kept: the context has drifted.

    context text   | T: context of the newest turn | G: sampled text | E: text after it   |
    recorded ids   | prompt ... up to ``mark.at``  | sampled tokens  | environment tokens |
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rollmesh.agents.openai_errors import shortened
from rollmesh.types import Int32Array, Segment, SegmentSource


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnMark:
    """Beginning of the newest turn, in text and in tokens; small enough to be stored with the trajectory."""

    characters: int
    """Length of the context text."""
    digest: str
    """blake2b (hex) of the context text."""
    at: int
    """Response tokens before the turn's first sampled token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Context that a call asks to continue."""

    text: str
    token_ids: Int32Array | None = None
    """Token ids, if the caller sent ids: then the ids are compared, and ``text`` is only their decoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fits:
    """The context continues the recorded trajectory."""

    new_ids: Int32Array
    """Tokens after the recorded ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """The context equals that of the newest turn: the same call again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Differs:
    """The context differs from the recorded trajectory."""

    why: str


Match = Fits | Repeats | Differs
Encode = Callable[[str], Int32Array]


def mark_turn(context: Context, at: int) -> TurnMark:
    """Return the mark of a turn whose sampled tokens begin after ``at`` response tokens."""
    return TurnMark(characters=len(context.text), digest=digest_of(context.text), at=at)


def digest_of(text: str) -> str:
    """Return the digest of a context text."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """Recorded tokens from the newest turn on."""

    sampled: Int32Array  # [tokens]; written by the policy in the turn
    environment: Int32Array  # [tokens]; environment tokens after them, of a turn that never began to sample


def tail_of(segments: Sequence[Segment], at: int) -> Tail:
    """Return the tokens after the first ``at`` response tokens: first the policy's, then the environment's."""
    sampled: list[Int32Array] = []
    environment: list[Int32Array] = []
    start = 0
    for segment in segments:
        end = start + len(segment)
        if end > at:
            ids = segment.token_ids[max(0, at - start) :]
            (sampled if segment.source is SegmentSource.POLICY else environment).append(ids)
        start = end
    return Tail(sampled=_joined(sampled), environment=_joined(environment))


def match_first(prompt_ids: Int32Array, context: Context, encode_whole: Encode) -> Fits | Differs:
    """Compare the first context of a trajectory with its group's prompt, by token ids."""
    ids = encode_whole(context.text) if context.token_ids is None else context.token_ids
    if _begins(ids, prompt_ids):
        return Fits(new_ids=ids[len(prompt_ids) :])
    return Differs(why=_first_difference(ids, prompt_ids))


def match_next(
    context: Context,
    mark: TurnMark,
    tail: Tail,
    recorded_ids: Int32Array,
    written_answer: Callable[[], Iterable[str]],
    encode: Callable[[str], Int32Array | None],
) -> Match:
    """Compare a context with a trajectory that has at least one turn.

    ``recorded_ids`` are prompt and response; ``written_answer()`` are the texts that ``tail.sampled`` may have in a
    context, and ``encode`` gives the tokens of the context's end, or None if they do not continue the sampled ones.
    """
    if context.token_ids is not None:
        return _match_ids(context.token_ids, recorded_ids, len(tail.sampled) + len(tail.environment))
    before, rest = context.text[: mark.characters], context.text[mark.characters :]
    if len(before) < mark.characters or digest_of(before) != mark.digest:
        return Differs(why="the conversation before the newest answer differs from the recorded one")
    if not rest:
        return Repeats()
    others: list[str] = []
    for written in written_answer():
        if written and rest.startswith(written):
            break
        others.append(written)
    else:
        return Differs(
            why=f"the newest answer was recorded as {shortened(others[0])!r} and was sent back as {shortened(rest)!r}"
        )
    new_ids = encode(rest[len(written) :])
    if new_ids is None:
        return Differs(why="the chat format writes the recorded turns differently before the new messages")
    if not _begins(new_ids, tail.environment):
        return Differs(why="the text after the newest answer differs from the previous call")
    return Fits(new_ids=new_ids[len(tail.environment) :])


def _match_ids(ids: Int32Array, recorded_ids: Int32Array, since_mark: int) -> Match:
    if _begins(ids, recorded_ids):
        new_ids = ids[len(recorded_ids) :]
        return Repeats() if since_mark == 0 and not len(new_ids) else Fits(new_ids=new_ids)
    if np.array_equal(ids, recorded_ids[: len(recorded_ids) - since_mark]):
        return Repeats()
    return Differs(why=_first_difference(ids, recorded_ids))


def _begins(ids: Int32Array, prefix: Int32Array) -> bool:
    return len(ids) >= len(prefix) and bool(np.array_equal(ids[: len(prefix)], prefix))


def _first_difference(ids: Int32Array, expected: Int32Array) -> str:
    shared = min(len(ids), len(expected))
    unequal = np.flatnonzero(ids[:shared] != expected[:shared])
    if len(unequal):
        at = int(unequal[0])
        return f"token {at} is {int(ids[at])}, expected {int(expected[at])}"
    return f"it has {len(ids)} tokens, fewer than the {len(expected)} expected"


def _joined(parts: Sequence[Int32Array]) -> Int32Array:
    return np.concatenate(parts).astype(np.int32, copy=False) if parts else np.empty(0, np.int32)
