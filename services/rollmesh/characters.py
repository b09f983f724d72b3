"""Half of a surrogate pair: JSON and YAML can escape one, but it is no character, and no text with one is encoded."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

_HALF = re.compile("[\ud800-\udfff]")


def half_character(text: str) -> str:
    """Return what is wrong with a text that has half of a surrogate pair; empty for any other text."""
    found = _HALF.search(text)
    return f"character {found.start()} is half of a surrogate pair, not a valid character" if found else ""


def half_characters(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the place of every text in a JSON value that has half of a surrogate pair, and what is wrong with it."""
    if isinstance(value, str):
        if problem := half_character(value):
            yield path, problem
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(key, str) and (problem := half_character(key)):
                yield (*path, ascii(key)), f"in the name {problem}"
            yield from half_characters(item, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for at, item in enumerate(value):
            yield from half_characters(item, (*path, str(at)))
