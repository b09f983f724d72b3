"""Verifier of mathematical equality with a reference, by math-verify and sympy (extra: reward)."""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, Literal

from math_verify import grader, parse, verify
from sympy import Add, FiniteSet, Float, Interval, Tuple

from rollmesh.errors import VerifierError
from rollmesh.tasks.verifiers.extraction import last_boxed, number_text, references

TAIL_CHARACTERS = 4_000
"""Parsed length of a response, from its end, where the answer is."""

DEEPEST_NESTING = 32
"""Limit of nested brackets in an answer; the time of the parser grows exponentially with them."""

_DELIMITED = re.compile(r"(?<!\\)\$.*(?<!\\)\$|(?<!\\)\\\(.*\\\)|(?<!\\)\\\[.*\\\]", re.DOTALL)
"""Formula within a text; the ``$`` of a price, ``\\$5``, delimits none."""
NOISE = 1e-12
"""Relative error of calculations with binary floating point."""
_MOST_ZEROS = 400
_SCIENTIFIC = re.compile(
    r"(?<![\w.\\}^])(?:(?:[0-9]+\.[0-9]+|1)[eE][-+]?[0-9]{1,2}|[0-9]+[eE](?:[-+][0-9]{2}|[0-9]{1,2}))(?!\w|\.[0-9])"
)
"""Number as programs print it."""
_MAYBE_SCIENTIFIC = re.compile(r"(?<![\w.\\}^])[0-9]+[eE][-+][0-9](?!\w|\.[0-9])")
"""``2e-6``, which may also mean 2e - 6."""
_Spelling = tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]
_LABEL = re.compile(
    r"\s*\\(?:text|textbf|mathrm|mathbf)\s*\{\s*\(([A-J])\)\s*\}?(?:\\[ ,;:]|\\q?quad|[~\s}])*(?=[^\s}])"
)
"""Letter of a choice before its value: ``\\textbf{(B)}\\ 6``."""
_BASED = re.compile(
    r"(?:\(\s*([0-9A-Z]+)\s*\)|\\text\s*\{\s*([0-9A-Z]+)\s*\}|\b([0-9A-Z]*[0-9]))\s*_\s*"
    r"(?:\{?\s*\\text\s*\{\s*(?:base)?\s*(\w+)\s*\}\s*\}?|\{\s*\(?(\w+)\)?\s*\}|([0-9]+))"
)
"""Numeral with a base: ``2010_7``, ``(2010)_{7}``, ``2010_{\\text{seven}}``; math-verify leaves bases out."""
_BASE_WORDS = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_equal_by_decimals = grader.sympy_numeric_eq


class MathVerifier:
    r"""Reward 1 if the last answer of a response is mathematically equal to a reference, else 0.

    The content of the last ``\boxed{...}`` counts; without one, the last formula or number. Whole numbers are compared
    without sympy. Bases count where both have one (``2010_7`` and ``2010_8`` differ); an equation of different numbers
    (``5=7``) is wrong. An answer that sympy cannot decide in time is wrong, not unscorable.
    """

    timeout_means_wrong = True

    def __init__(self, float_rounding: int = 6, strict: bool = True) -> None:
        """Create a verifier.

        ``float_rounding``: number of compared decimals, for numbers below 0.1 from their first digit that is not 0.
        ``strict``: sets do not equal tuples, and the names of variables count.
        """
        self._equal = partial(equal, float_rounding=float_rounding, strict=strict)
        # The first call compiles the patterns; do it here, outside the time limit of an answer.
        self._equal(read("$1$", boxed=False), read("2", boxed=True))

    def verify(self, response: str, prompt_metadata: Mapping[str, Any]) -> float:
        accepted = [text.strip() for text in references(prompt_metadata, "math")]
        boxed = last_boxed(response)
        answer = boxed if boxed is not None else response[-TAIL_CHARACTERS:].strip()
        if len(answer) > TAIL_CHARACTERS or max(accumulate(answer, _depth, initial=0)) > DEEPEST_NESTING:
            return 0.0
        return float(any(self._matches(reference, answer, boxed is not None) for reference in accepted))

    def _matches(self, reference: str, answer: str, boxed: bool) -> bool:
        if _is_whole(reference) and _is_whole(answer):
            return int(reference) == int(answer)
        boxed_reference = last_boxed(reference)
        text = reference if boxed_reference is None else boxed_reference
        # Otherwise a formula within text has to be found first.
        alone = boxed_reference is not None or _DELIMITED.search(reference) is None
        meanings = list(readings(text, boxed=alone))
        if not meanings[0].found:
            raise VerifierError(f"math: the prompt's answer {reference[:80]!r} is not mathematics that sympy can read")
        if answer == reference:
            return True
        given = list(readings(answer, boxed=boxed))
        return any(self._equal(gold, meant) for gold in meanings for meant in given)


def _is_whole(text: str) -> bool:
    digits = text.removeprefix("-")
    return digits.isascii() and digits.isdigit() and len(digits) <= 400


def _depth(outside: int, character: str) -> int:
    return outside + 1 if character in "([{" else max(0, outside - (character in ")]}"))


_SPELLINGS: tuple[_Spelling, ...] = (
    (re.compile(r"\\\$|[\u20ac\u00a3\u00a5\u20b9]"), ""),
    # 1 000 and 1\,000, of which it reads a product with 0
    (
        re.compile(r"(?<![\d.])[1-9]\d{0,2}(?:(?:\\[,;: ]|[~ \u00a0\u2009\u202f])\d{3}(?!\d|\s*/))+"),
        lambda number: re.sub(r"\D", "", number[0]),
    ),
    # 3 1/2
    (re.compile(r"(?<![\d./])(\d+) +(\d+)/(\d+)(?![\d.])"), r"\1\\frac{\2}{\3}"),
    # 0.1\overline{6}
    (
        re.compile(r"(?<![\d.])(\d*)\.(\d{0,99})\\overline\s*\{(\d{1,99})\}"),
        lambda number: _fraction(number[1] or "0", number[2], number[3]),
    ),
    # 16\frac{2}{3}\%, of which it reads no 16
    (
        re.compile(r"(?<![\d.])(\d{0,99})\s*\\[dt]?frac\s*\{?(\d{1,99})\}?\s*\{?(\d{1,99})\}?\s*(?:\\?%|percent)"),
        lambda share: f"\\frac{{{int(share[1] or 0) * int(share[3]) + int(share[2])}}}{{{share[3]}}}\\%",
    ),
    (re.compile(r"\\([lr])brace(?![a-zA-Z])"), lambda brace: "\\{" if brace[1] == "l" else "\\}"),
    (re.compile(r"\\varnothing(?![a-zA-Z])"), r"\\emptyset"),
    (re.compile(r"^\s*\\approx(?![a-zA-Z])"), ""),
    # the end of a sentence
    (re.compile(r"(?<=[^.\s\\])(?<!\\right)[.,;]\s*$"), ""),
)
"""Spellings that math-verify does not read, or takes for something else, and what replaces them, in order."""

# The package warns on every call that its time-out is off; the process pool enforces the time-out instead.
logging.getLogger("math_verify").setLevel(logging.ERROR)


@dataclass(frozen=True, slots=True)
class Mathematics:
    """Text that math-verify has read."""

    found: list[Any]
    """The expression of sympy, if there is one, and the text that was read; empty if nothing was found."""
    expression: Any
    """Expression of sympy; None without one."""
    brackets: Literal["set", "tuple"] | None
    bases: frozenset[str]
    """Bases of the numerals in the text that was read."""


def readings(text: str, *, boxed: bool) -> Iterator[Mathematics]:
    """Yield what a text may mean."""
    yield read(text, boxed=boxed)
    if _MAYBE_SCIENTIFIC.search(text):
        yield read(_MAYBE_SCIENTIFIC.sub(lambda number: number_text(number[0]), text), boxed=boxed)
    if label := _LABEL.match(text):
        yield read(label[1], boxed=True)
        yield read(text[label.end() :], boxed=boxed)


@lru_cache(maxsize=4096)
def read(text: str, *, boxed: bool) -> Mathematics:
    """Read an answer, or the last formula or number of a text that contains one."""
    numerals: dict[str, str] = {}

    def without_base(match: re.Match[str]) -> str:
        """Return a numeral alone, and note it with its base, in digits where the word is known."""
        numeral, base = (next(part for part in parts if part) for parts in (match.groups()[:3], match.groups()[3:]))
        numerals[numeral] = str(_BASE_WORDS.index(base) + 2) if base in _BASE_WORDS else base
        return numeral

    for pattern, plain in _SPELLINGS:
        text = pattern.sub(plain, text)
    text = _BASED.sub(without_base, _SCIENTIFIC.sub(lambda number: number_text(number[0]), text))
    found = parse(f"\\boxed{{{text}}}" if boxed else text, parsing_timeout=None)
    expression = None if not found or isinstance(found[0], str) else found[0]
    source = found[-1] if found and isinstance(found[-1], str) else ""
    brackets: Literal["set", "tuple"] | None = "tuple" if isinstance(expression, Tuple | Interval) else None
    if isinstance(expression, FiniteSet) and source.startswith(("\\{", "\\lbrace", "{")):
        brackets = "set"
    bases = {numerals[word] for word in re.findall(r"[0-9A-Z]+", source) if word in numerals}
    return Mathematics(found, expression, brackets, frozenset(bases))


def equal(gold: Mathematics, answer: Mathematics, *, float_rounding: int, strict: bool) -> bool:
    """Tell whether an answer equals the reference."""
    if gold.bases and answer.bases and gold.bases != answer.bases:
        return False
    if strict and {gold.brackets, answer.brackets} == {"set", "tuple"}:
        return False
    if _is_false(answer.expression, float_rounding):
        return False
    return bool(verify(gold.found, answer.found, float_rounding=float_rounding, strict=strict, timeout_seconds=None))


def _fraction(whole: str, before: str, repeated: str) -> str:
    """Return a repeating decimal as a fraction: of ``0.1`` and ``6`` it is 15/90."""
    numerator = int(whole + before + repeated) - int(whole + before)
    return f"\\frac{{{numerator}}}{{{'9' * len(repeated)}{'0' * len(before)}}}"


def _is_false(expression: Any, float_rounding: int) -> bool:
    """Tell whether an answer is an equation of different numbers; math-verify takes the right side of any equation."""
    if not grader.is_equation(expression):
        return False
    relations = expression._unsorted_args if isinstance(expression, grader.And) else [expression]
    numbers = [side for relation in relations for side in relation.args if side.is_number]
    return any(not grader.sympy_expr_eq(numbers[0], number, float_rounding, 15) for number in numbers)


def _numbers_equal(a: Any, b: Any, float_rounding: int, numeric_precision: int) -> bool:
    """Compare as math-verify does, but count decimals from the first digit that is not 0, and let 12.5% be 12.5 too."""
    without_percent = grader.get_pct_val(a, a), grader.get_pct_val(b, b)
    if without_percent != (a, b) and _numbers_equal(*without_percent, float_rounding, numeric_precision):
        return True
    zeros = max(_leading_zeros(a), _leading_zeros(b))
    floats = getattr(a, "is_number", False) and getattr(b, "is_number", False) and (a.has(Float) or b.has(Float))
    if floats:
        a, b = a.evalf(), b.evalf()
    if _equal_by_decimals(a, b, float_rounding + zeros, numeric_precision + zeros):
        return True
    return floats and bool(abs(a - b) <= NOISE * abs(a))


def _leading_zeros(expression: Any) -> int:
    """Return the number of zeros after the decimal point of the smallest term; 0 for matrices, compared by entry."""
    if not hasattr(expression, "is_number"):
        return 0
    zeros = 0
    for term in [expression] if expression.is_number else Add.make_args(expression):
        size = abs(term.subs(dict.fromkeys(term.free_symbols, 1)).evalf(5))
        if size.is_Float and size > 0:
            zeros = max(zeros, -1 - Decimal(str(size)).adjusted())
    return min(zeros, _MOST_ZEROS)


# math-verify has one absolute tolerance for numbers of all sizes: 9.1e-31 would equal 1.6e-19, also within sets.
grader.sympy_numeric_eq = _numbers_equal
