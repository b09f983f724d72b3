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

_PYTHON = re.compile(r"(?:i?python|py)[23]?")
_MARK = re.compile(r"`{3,}|~{3,}")


@dataclass(frozen=True, slots=True)
class _Fence:
    line: int
    """Number of its line; that of the line before the response for a block that the prompt has opened."""
    tag: str
    """Language; empty without one."""
    mark: str = "```"
    indent: int = 0

    @property
    def is_python(self) -> bool:
        return _PYTHON.fullmatch(self.tag) is not None

    def is_closed_by(self, other: _Fence) -> bool:
        """Tell whether another fence ends the block, and is no part of it, such as an example in a docstring."""
        return not other.tag and other.mark.startswith(self.mark) and other.indent <= self.indent + 3


@dataclass(frozen=True, slots=True)
class _Block:
    fence: _Fence
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
    for python in (True, False):
        for closed in (True, False):
            for block in reversed(blocks):
                if (block.fence.is_python if python else not block.fence.tag) and block.closed is closed:
                    return textwrap.dedent(_text(lines, block))
    return response


def _blocks(lines: Sequence[str]) -> list[_Block]:
    fences = [fence for number, line in enumerate(lines) if (fence := _fence(number, line)) is not None]
    blocks: list[_Block] = []
    opened = _opened_by_the_prompt(lines, fences)
    for fence in fences:
        if opened is not None and opened.is_closed_by(fence):
            blocks.append(_Block(opened, fence.line, closed=True))
            opened = None
        elif opened is None or not opened.tag:
            opened = fence
    if opened is not None:
        is_cut_in_fence = lines[-1].strip() in ("`", "``")
        blocks.append(_Block(opened, len(lines) - is_cut_in_fence, closed=False))
    return blocks


def _fence(number: int, line: str) -> _Fence | None:
    """Return the fence of a line; text may stand before one that is tagged as Python."""
    mark = _MARK.search(line)
    if mark is None or "`" in line[mark.end() :]:
        return None
    before = line[: mark.start()]
    tag = re.sub(r"\W.*", "", line[mark.end() :].lstrip(" {.")).lower()
    if not before.strip():
        return _Fence(number, tag, mark[0], len(before))
    return _Fence(number, tag, mark[0]) if _PYTHON.fullmatch(tag) else None


def _opened_by_the_prompt(lines: Sequence[str], fences: Sequence[_Fence]) -> _Fence | None:
    """Return the fence of the prompt if the response begins with its tag, or with Python and a fence is left over."""
    if _PYTHON.fullmatch(lines[0].strip().lower()):
        return _Fence(0, "python")
    untagged = next((at for at, fence in enumerate(fences) if fence.tag), len(fences))
    if untagged % 2 == 0:
        return None
    try:
        with warnings.catch_warnings(action="ignore"):
            is_python = ast.parse(textwrap.dedent("\n".join(lines[: fences[0].line]))).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    return _Fence(-1, "python") if is_python else None


def _text(lines: Sequence[str], block: _Block) -> str:
    return "".join(f"{line}\n" for line in lines[block.fence.line + 1 : block.end])
