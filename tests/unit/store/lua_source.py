"""Names that a Lua file of the store defines and uses, as its ``-- uses:`` line must state them."""

from __future__ import annotations

import re
from collections.abc import Mapping

_DEFINED = re.compile(r"^local (?:function )?(\w+(?:, \w+)*)", re.MULTILINE)
_NOT_CODE = re.compile(r"--.*|'[^'\n]*'")
_NAME = re.compile(r"(?<!\w)(?<!(?<!\.)\.)[A-Za-z_]\w*")
"""A name that is not a field; a field follows a single dot, while two dots are a concatenation."""
_COMMENT_LINES = re.compile(r"^--.*\n", re.MULTILINE)


def split_functions(text: str) -> dict[str, str]:
    """Split a library file into its top-level ``local`` statements, by every name they define; drops comment lines."""
    text = _COMMENT_LINES.sub("", text)
    starts = [match.start() for match in _DEFINED.finditer(text)]
    parts = [text[start:end].rstrip() for start, end in zip(starts, [*starts[1:], None], strict=True)]
    return {name: part for part in parts for name in _DEFINED.findall(part)[0].split(", ")}


def header_problem(name: str, text: str, libraries: Mapping[str, str]) -> str | None:
    """Return what is wrong with the ``-- uses:`` line of a file (without its flags); None when it is exact."""
    header, _, code = text.partition("\n")
    bare = _NOT_CODE.sub("", code)
    if "--[[" in code or '"' in bare or "[[" in bare:
        return f"{name}: use single quotes for Lua strings and one-line comments only"
    owners: dict[str, str] = {}
    for library, source in libraries.items():
        for defined in split_functions(source):
            if owners.setdefault(defined, library) != library:
                return f"{defined} is defined in {owners[defined]} and in {library}"
    called = {owners[word] for word in _NAME.findall(bare) if word in owners} - {name}
    listed = header.removeprefix("-- uses:").split()
    if missing := called - set(listed):
        return f"{name}: it calls {', '.join(sorted(missing))} and does not list it"
    if unused := set(listed) - called:
        return f"{name}: it lists {', '.join(sorted(unused))} and does not call it"
    return None if listed == sorted(listed) else f"{name}: the names are not in alphabetical order"
