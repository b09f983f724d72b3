"""Find the answer inside a response: small, linear rules, because a response can be a megabyte of anything."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from rollmesh.errors import ConfigError, VerifierError

Extractor = Callable[[str], str | None]
"""From a response to its answer; None when there is none."""

TAIL_CHARACTERS = 20_000
"""An answer stands at the end: only so much of a response is searched."""

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d{1,3})?(?:\s?/\s?\d+)?|[-+]?\.\d+")
_LONGEST_NUMBER = 400


def make_extractor(how: str) -> Extractor:
    """The extractor called ``how``; raises ConfigError for an unknown one.

    whole: the response without surrounding space. last_line: its last line that is not blank.
    last_number: its last number. boxed: the content of the last ``\\boxed{...}``.
    tag:NAME: the content of the last ``<NAME>...</NAME>``. after:TEXT: what follows the last TEXT, to the line's end.
    """
    simple = {"whole": _whole, "last_line": _last_line, "last_number": last_number, "boxed": last_boxed}
    if how in simple:
        return simple[how]
    kind, separator, argument = how.partition(":")
    if separator and argument and kind == "tag":
        return lambda response: last_tag(response, argument)
    if separator and argument and kind == "after":
        return lambda response: _after(response, argument)
    raise ConfigError(f"extract: {how!r} is none of {', '.join(simple)}, tag:NAME, after:TEXT")


def last_number(response: str) -> str | None:
    """The last number, with thousands separators, exponent or denominator."""
    found = None
    for match in _NUMBER.finditer(response[-TAIL_CHARACTERS:]):
        found = match
    return found[0] if found is not None and len(found[0]) <= _LONGEST_NUMBER else None


def last_boxed(response: str) -> str | None:
    r"""The content of the last ``\boxed{...}`` with balanced braces."""
    tail = response[-TAIL_CHARACTERS:]
    opening = "\\boxed{"
    start = tail.rfind(opening)
    if start < 0:
        return None
    depth = 1
    for at in range(start + len(opening), len(tail)):
        depth += (tail[at] == "{") - (tail[at] == "}")
        if depth == 0:
            return tail[start + len(opening) : at].strip()
    return None


def last_tag(response: str, name: str) -> str | None:
    """The content of the last closed ``<name>...</name>``."""
    end = response.rfind(f"</{name}>")
    start = response.rfind(f"<{name}>", 0, end) if end >= 0 else -1
    return response[start + len(name) + 2 : end].strip() if start >= 0 else None


def references(metadata: Mapping[str, Any], verifier: str) -> list[str]:
    """The accepted answers as text: ``answer`` of the metadata, one or a list; raises VerifierError without one."""
    if "answer" not in metadata:
        raise VerifierError(f"{verifier}: the prompt's metadata has no field 'answer'; it has {sorted(metadata)}")
    answer = metadata["answer"]
    accepted = answer if isinstance(answer, list) else [answer]
    if not accepted:
        raise VerifierError(f"{verifier}: the prompt's answer is an empty list")
    return [reference_text(item, verifier) for item in accepted]


def reference_text(answer: Any, verifier: str) -> str:
    """One reference answer as text; whole numbers lose the ``.0`` that travelling as JSON gave them."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise VerifierError(f"{verifier}: the prompt's answer must be text or a number, got {type(answer).__name__}")
    if isinstance(answer, float) and answer.is_integer():
        return str(int(answer))
    return str(answer)


def _whole(response: str) -> str:
    return response.strip()


def _last_line(response: str) -> str | None:
    stripped = response.strip()
    return stripped[stripped.rfind("\n") + 1 :].strip() or None


def _after(response: str, text: str) -> str | None:
    start = response.rfind(text)
    if start < 0:
        return None
    return response[start + len(text) :].partition("\n")[0].strip() or None
