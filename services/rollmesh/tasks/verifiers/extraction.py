"""Extraction of the answer from a response, in linear time, because a response can be a megabyte of any text."""

import ast
import re
import textwrap
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from rollmesh.errors import ConfigError, VerifierError

Extractor = Callable[[str], str | None]
"""Function from a response to its answer; None if there is no answer."""

TAIL_CHARACTERS = 20_000
"""Searched length of a response, from its end, where the answer is."""

_SIGN = r"(?:(?<![\w)\]}.])[-+\u2212])?"
_GAP = r"[^\S\r\n\t]"
_NO_POWER = r"\s*(?:\\circ|\\prime|o|st|nd|rd|th|[-+*])\s*\}"
_POWER = (
    rf"{_GAP}?\^{_GAP}?(?:\{{(?!{_NO_POWER})[^{{}}]*\}}"
    r"|[{(]?[-+\u2212]?[0-9]+(?:[.,/][0-9]+|[eE][-+]?[0-9]+)*|[A-Za-np-z](?![A-Za-z]))"
)
"""A power; neither degrees (``90^o``, ``90^{\\circ}``) nor an ordinal (``5^{th}``)."""
_INDEX = r"(?<=[A-Za-z0-9)}\]])_(?:\{[^{}]*\}|[0-9]+)"
_CANDIDATE = re.compile(
    rf"\([^()]{{0,100}}\){_POWER}"  # (2)^3
    rf"|{_SIGN}(?:[0-9]{{1,3}}(?:{_GAP}[0-9]{{3}}(?![0-9]))+(?:[.,][0-9]+)*"  # 12 000
    rf"|[0-9]+{_GAP}(?=[0-9]+\s?/\s?[0-9])[0-9]+"  # 3 1/2
    r"|(?:[0-9][0-9.,]*[0-9]|[0-9]|(?<![\w.])\.[0-9]+))"
    rf"(?:\s?/\s?[0-9]+(?:[.,][0-9]+)*|[eE][-+]?[0-9]+)*(?:{_POWER})?"
    rf"|{_POWER}|{_INDEX}|\\[dt]?frac(?:\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}}){{1,2}}"
)
"""Characters that may be one number, or contain none that counts; ``_NUMBER`` decides."""
_NUMBER = re.compile(
    r"[-+\u2212]?(?:(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3})?(?:\s?/\s?0*[1-9][0-9]*)?|\.[0-9]+)"
)
_RAISED = "\u2070\xb9\xb2\xb3\u2074\u2075\u2076\u2077\u2078\u2079\u207a\u207b\u207f"
_LOWERED = str.maketrans(_RAISED, "0123456789+-n")
_RAISED_POWER = re.compile(rf"(?<=[0-9)])[{_RAISED}]+")
_PART = r"(?:\{\s*([-+]?[0-9][0-9.,]*)\s*\}|([0-9]))"
_SPELLINGS = tuple(
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"\\!", ""),
        (r"\{,\}", ","),
        (r"(?<=[0-9])(?:\\,|[\u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))", ","),
        (r"\\,", " "),
        (r"(?<=[-+\u2212])(?<!\$[-+\u2212])\\?\$(?=[0-9.])", ""),
        (r"(?<=[0-9])(?=\\[dt]?frac)", " "),
        (rf"\\[dt]?frac\s?{_PART}\s?{_PART}", r"\1\2/\3\4"),
        (r"(?<=[0-9])\s?(?:\\times|\\cdot|[*\u00b7\u00d7])\s?10\s?\^\s?(?:\{([-+]?[0-9]+)\}|([-+]?[0-9]+))", r"e\1\2"),
    )
)
"""Spellings of TeX and print within a number, and the plain ones that replace them, in order."""
_LONGEST_NUMBER = 400
OPENING_TAG = re.compile(r"([<\[\u25c1])((?:\w+:)?(?:think|thinking|thought|reasoning)[>\]\u25b7])", re.IGNORECASE)
"""Beginning of a thought: ``<think>``, ``<seed:think>``, ``[THINK]``, and that of Kimi, between triangles."""
_BRACE = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|(?P<escaped>\\\\(?!boxed|fbox)|\\[{}])|\{|\}")


def make_extractor(how: str) -> Extractor:
    r"""Return the extractor called ``how``. Raises ConfigError for an unknown name.

    whole: the response without surrounding space. last_line: its last line that is not blank.
    last_number: its last number. boxed: the content of the last ``\boxed{...}``.
    tag:NAME: the content of the last ``<NAME>...</NAME>``. after:TEXT: the text after the last TEXT, to the line's end.
    """
    simple: dict[str, Extractor] = {
        "whole": str.strip,
        "last_line": lambda response: response.strip().rpartition("\n")[2].strip() or None,
        "last_number": last_number,
        "boxed": last_boxed,
    }
    if how in simple:
        return simple[how]
    kind, _, argument = how.partition(":")
    if argument and kind == "tag":
        return lambda response: last_tag(response, argument)
    if argument and kind == "after":
        return lambda response: (
            (response.rpartition(argument)[2].partition("\n")[0].strip() if argument in response else None) or None
        )
    raise ConfigError(f"extract: {how!r} is not one of {', '.join(simple)}, tag:NAME, after:TEXT")


def last_number(response: str) -> str | None:
    r"""Return the last number, with thousands separators, exponent or denominator; TeX is written plainly.

    A sign belongs to a number unless it follows an operand (``3-6`` ends with 6). ``1,2``, ``1.2.3``, ``7/0``,
    ``3 1/2``, ``12 000``, ``2^3``, ``2^n`` and ``(2)^3`` are not numbers, nor are their parts, nor is an exponent
    (``cm^2``) or an index (``x_1``; ``101_2`` ends with 101).
    """
    found = None
    text = response[-TAIL_CHARACTERS:]
    text = _RAISED_POWER.sub(lambda power: f"^{{{power[0].translate(_LOWERED)}}}", text)
    for pattern, plain in _SPELLINGS:
        text = pattern.sub(plain, text)
    for match in _CANDIDATE.finditer(text):
        if len(match[0]) <= _LONGEST_NUMBER and _NUMBER.fullmatch(match[0]):
            found = match[0]
    return found.replace("\u2212", "-") if found is not None else None


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """Return the last match of a pattern; None without one."""
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


def last_boxed(response: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` with balanced braces; an unclosed one does not count.

    The braces of sets, ``\{`` and ``\}``, need no partner.
    """
    tail = response[-TAIL_CHARACTERS:]
    found = None
    openings: list[int | None] = []  # start of the content of each open \boxed{; None for a plain brace
    for match in _BRACE.finditer(tail):
        if match["escaped"]:
            continue
        if match[0] != "}":
            openings.append(match.end() if match["box"] else None)
        elif openings and (start := openings.pop()) is not None and (found is None or start > found[0]):
            found = (start, match.start())
    return tail[found[0] : found[1]].strip() if found is not None else None


def last_tag(response: str, name: str) -> str | None:
    """Return the content of the last closed ``<name>...</name>``."""
    opening, closing = f"<{name}>", f"</{name}>"
    start = response.rfind(opening, 0, max(0, response.rfind(closing)))
    if start < 0:
        return None
    start += len(opening)
    return response[start : response.find(closing, start)].strip()


def without_own_thought(response: str) -> str:
    """Return what follows the thought with which a response begins; all of a response that begins with none."""
    opened = OPENING_TAG.match(response.lstrip())
    return answer_after(response, f"{opened[1]}/{opened[2]}") if opened is not None else response


def answer_after(response: str, marker: str, prompt: str = "") -> str:
    """Return what follows the last marker, and nothing without one.

    A closing tag, such as ``</think>``, may be missing: then all of the response is the answer. Nothing is the answer
    where the tag's thought is still open, in the response or since the prompt.
    """
    _, found, answer = response.rpartition(marker)
    if marker[1:2] != "/":
        return answer if found else ""
    opening = marker.replace("/", "", 1)
    is_open = opening in answer or (not found and prompt.rfind(opening) > prompt.rfind(marker))
    return "" if is_open else answer


def references(metadata: Mapping[str, Any], verifier: str) -> list[str]:
    """Return the accepted answers as text, from ``answer`` of the metadata. Raises VerifierError without any."""
    if "answer" not in metadata:
        raise VerifierError(f"{verifier}: the prompt's metadata has no field 'answer'; it has {sorted(metadata)}")
    answer = metadata["answer"]
    accepted = answer if isinstance(answer, list) else [answer]
    if not accepted:
        raise VerifierError(f"{verifier}: the prompt's answer is an empty list")
    return [reference_text(item, verifier) for item in accepted]


def reference_text(answer: Any, verifier: str) -> str:
    """Return one reference answer as text."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise VerifierError(f"{verifier}: the prompt's answer must be text or a number, got {type(answer).__name__}")
    return answer if isinstance(answer, str) else number_text(str(answer))


def number_text(number: str) -> str:
    """Return a number that a program printed in plain digits, which read the same everywhere: ``2.5e-06``, ``1.0``."""
    digits = f"{Decimal(number):f}"
    return digits.removesuffix(".0")


LONGEST_CODE = 200_000
"""Limit in characters; longer code is wrong."""
_PYTHON = re.compile(r"(?:i?python|py)[23]?")
_MARK = re.compile(r"`{3,}|~{3,}")


class _Fence(NamedTuple):
    line: int
    """Number of its line; that of the line before the response for a block that the prompt has opened."""
    tag: str
    """Language; empty without one."""
    mark: str = "```"
    indent: int = 0


def extract_code(response: str) -> str:
    """Return the solution of an answer.

    It is the last closed block that is tagged as Python, without one a block that is cut off, then the last block
    without a tag, then the whole response. The prompt may have opened the first block.
    """
    lines = response[-2 * LONGEST_CODE :].replace("\r\n", "\n").split("\n")
    blocks = [(tag, text, closed) for tag, text, closed in _blocks(lines) if text.strip()]
    for python in (True, False):
        for wanted in (True, False):
            for tag, text, closed in reversed(blocks):
                if closed is wanted and (_PYTHON.fullmatch(tag) if python else not tag):
                    return textwrap.dedent(text)
    return response


def _blocks(lines: Sequence[str]) -> Iterator[tuple[str, str, bool]]:
    """Yield the tag and the text of each block, and whether it is closed."""
    fences = [fence for number, line in enumerate(lines) if (fence := _fence(number, line)) is not None]
    opened = _opened_by_the_prompt(lines, fences)
    for fence in fences:
        # Another fence ends the block, or is a part of it, such as an example in a docstring.
        if opened and not fence.tag and fence.mark.startswith(opened.mark) and fence.indent <= opened.indent + 3:
            yield opened.tag, _joined(lines[opened.line + 1 : fence.line]), True
            opened = None
        elif opened is None or not opened.tag:
            opened = fence
    if opened is not None:
        is_cut_in_fence = lines[-1].strip() in ("`", "``")
        yield opened.tag, _joined(lines[opened.line + 1 : len(lines) - is_cut_in_fence]), False


def _joined(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


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
