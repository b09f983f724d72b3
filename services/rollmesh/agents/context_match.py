"""Whether a context goes on where a recorded trajectory ends.

An agent sends its whole conversation with every call, as text. The model's own words in it are not tokenised again:
the text is compared with the text of what is recorded, and where it agrees the recorded ids stay, exactly as sampled.
Only what follows is new, and tokenised once. Where it does not agree (the agent edited its history, or the template
renders it in another way than it was written) nothing of the recorded ids can be kept: that is drift.

    context text   | T: context of the newest turn | G: what was sampled | E: text since then |
    recorded ids   | prompt ... up to ``mark.at``  | sampled tokens      | environment tokens |
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rollmesh.types import Int32Array, Segment, SegmentSource


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnMark:
    """Where the newest turn begins, in text and in tokens; small enough to be kept with the trajectory."""

    characters: int
    """Length of the context text."""
    digest: str
    """blake2b (hex) of the context text."""
    at: int
    """Response tokens before the turn's first sampled token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a call asks to continue."""

    text: str
    token_ids: Int32Array | None = None
    """Given instead of text by the caller: then ids are compared, and ``text`` is only their reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fits:
    """The context goes on where the record ends."""

    new_ids: Int32Array
    """Tokens that follow the recorded ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """The context is that of the newest turn: the same call again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Differs:
    """The context is another one."""

    why: str


Match = Fits | Repeats | Differs
Encode = Callable[[str], Int32Array]


def mark_turn(context: Context, at: int) -> TurnMark:
    """The mark of a turn whose sampled tokens begin after ``at`` response tokens."""
    return TurnMark(characters=len(context.text), digest=digest_of(context.text), at=at)


def digest_of(text: str) -> str:
    """Digest of a context text."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """Recorded tokens from the newest turn on."""

    sampled: Int32Array  # [tokens]; what the policy wrote in the turn
    heard: Int32Array  # [tokens]; environment tokens after it, of a turn that never began to sample


def tail_of(segments: Sequence[Segment], at: int) -> Tail:
    """The tokens after the first ``at`` response tokens: one run of the policy's, then the environment's."""
    sampled: list[Int32Array] = []
    heard: list[Int32Array] = []
    start = 0
    for segment in segments:
        end = start + len(segment)
        if end > at:
            ids = segment.token_ids[max(0, at - start) :]
            (sampled if segment.source is SegmentSource.POLICY else heard).append(ids)
        start = end
    return Tail(sampled=_joined(sampled), heard=_joined(heard))


def match_first(prompt_ids: Int32Array, context: Context, encode_whole: Encode) -> Fits | Differs:
    """Compare the first context of a trajectory with its group's prompt, by token ids."""
    ids = encode_whole(context.text) if context.token_ids is None else context.token_ids
    if _begins(ids, prompt_ids):
        return Fits(new_ids=ids[len(prompt_ids) :])
    return Differs(why=_first_difference(ids, prompt_ids))


def match_next(
    context: Context, mark: TurnMark, tail: Tail, recorded_ids: Int32Array, raw: Callable[[], str], encode: Encode
) -> Match:
    """Compare a context with a record that has had a turn.

    ``recorded_ids`` is prompt and response; ``raw()`` the text of ``tail.sampled``, special tokens included.
    """
    if context.token_ids is not None:
        return _match_ids(context.token_ids, recorded_ids, len(tail.sampled) + len(tail.heard))
    before, rest = context.text[: mark.characters], context.text[mark.characters :]
    if len(before) < mark.characters or digest_of(before) != mark.digest:
        return Differs(why="the conversation before the newest answer is not the one that was recorded")
    if not rest:
        return Repeats()
    written = raw()
    if not written or not rest.startswith(written):
        return Differs(why=f"the newest answer was recorded as {_short(written)} and comes back as {_short(rest)}")
    new_ids = encode(rest[len(written) :])
    if not _begins(new_ids, tail.heard):
        return Differs(why="other text follows the newest answer than in the call before")
    return Fits(new_ids=new_ids[len(tail.heard) :])


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


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
