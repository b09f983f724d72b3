"""Choice of the code in an answer: its last block that is tagged as Python."""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

LONGEST_CODE = 200_000
"""Limit in characters; longer code is wrong."""

_PYTHON_TAGS = ("py", "python", "python3")


@dataclass(frozen=True, slots=True)
class _Block:
    tag: str
    first: int
    """Number of its first line."""
    end: int
    """Number of the line after its last one."""
    closed: bool


def extract_code(response: str) -> str:
    """Return the solution of an answer.

    It is the last closed block that is tagged as Python, without one a block that is cut off, then the last block
    without a tag, then the whole response. The prompt may have opened the first block.
    """
    lines = response[-2 * LONGEST_CODE :].replace("\r\n", "\n").split("\n")
    blocks = [block for block in _blocks(lines) if _text(lines, block).strip()]
    for tags in (_PYTHON_TAGS, ("",)):
        for closed in (True, False):
            for block in reversed(blocks):
                if block.tag in tags and block.closed is closed:
                    return textwrap.dedent(_text(lines, block))
    return response


def _blocks(lines: Sequence[str]) -> list[_Block]:
    fences = [(number, tag) for number, line in enumerate(lines) if (tag := _fence_tag(line)) is not None]
    blocks: list[_Block] = []
    opened = ("python", 0) if _begins_in_a_block(lines, fences) else None
    for number, tag in fences:
        if opened is not None and not tag:
            blocks.append(_Block(opened[0], opened[1], number, closed=True))
            opened = None
        elif opened is None or not opened[0]:
            opened = (tag, number + 1)
    if opened is not None:
        blocks.append(_Block(opened[0], opened[1], len(lines), closed=False))
    return blocks


def _fence_tag(line: str) -> str | None:
    """Return the language of a fence, empty without one; None for another line."""
    before, fence, info = line.partition("```")
    found = re.search(r"\w+", info)
    tag = found[0].lower() if found is not None else ""
    if not fence or "`" in info or (before.strip() and tag not in _PYTHON_TAGS):
        return None
    return tag


def _begins_in_a_block(lines: Sequence[str], fences: Sequence[tuple[int, str]]) -> bool:
    """Tell whether a fence is left over, and Python comes before the first one."""
    untagged = next((at for at, (_, tag) in enumerate(fences) if tag), len(fences))
    if untagged % 2 == 0:
        return False
    try:
        with warnings.catch_warnings(action="ignore"):
            return bool(ast.parse(textwrap.dedent("\n".join(lines[: fences[0][0]]))).body)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False


def _text(lines: Sequence[str], block: _Block) -> str:
    return "".join(f"{line}\n" for line in lines[block.first : block.end])
