"""Tests of a code prompt, in the forms of public data sets, and the comparison of their values."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from rollmesh.errors import VerifierError
from rollmesh.tasks.verifiers.code_asserts import AssertTest, split_asserts

_DECIMAL = re.compile(r"(?<![\w.+-])[+-]?(?:\d+\.\d*|\.?\d+)(?:[eE][+-]?\d{1,3})?(?![\w.])", re.ASCII)
"""A decimal number that is no part of a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTests:
    """All tests of one prompt; their comparisons are made outside the sandbox."""

    entry_point: str
    calls: Sequence[Mapping[str, Any]]
    """``args`` and ``kwargs`` of calls of the entry point."""
    expected: Sequence[Any]
    """Results of the calls."""
    asserts: Sequence[AssertTest]
    """Split Python statements."""
    programs: Sequence[tuple[str, str]]
    """Standard input and output of the answer as a program."""

    def __len__(self) -> int:
        return len(self.calls) + sum(bool(test.checks) for test in self.asserts) + len(self.programs)


def read_tests(metadata: Mapping[str, Any]) -> CodeTests:
    """Read ``tests`` (a list, or its JSON text) and ``entry_point`` of a prompt's metadata.

    A test is a text with ``assert`` statements, ``{"input", "output"}`` for a program, or ``{"args", "kwargs",
    "expected"}`` for a call of ``entry_point`` (``function`` or ``Class.method``). A text without an assert is set-up
    for the texts after it and is not counted. Raises VerifierError with the invalid test.
    """
    tests = metadata.get("tests")
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError as error:
            raise VerifierError(f"python_code: field 'tests' is not valid JSON: {error}") from error
    if not isinstance(tests, list) or not tests:
        raise VerifierError(f"python_code: the prompt's metadata needs a list 'tests', got {type(tests).__name__}")
    entry_point = metadata.get("entry_point", "")
    calls: list[Mapping[str, Any]] = []
    expected: list[Any] = []
    asserts: list[AssertTest] = []
    programs: list[tuple[str, str]] = []
    for number, test in enumerate(tests):
        where = f"python_code: tests[{number}]"
        if isinstance(test, str):
            asserts.append(split_asserts(test, str(entry_point), where))
        elif isinstance(test, Mapping) and {"input", "output"} <= set(test):
            programs.append((_lines(test["input"], where), _lines(test["output"], where)))
        elif isinstance(test, Mapping) and "expected" in test:
            args, kwargs = test.get("args", []), test.get("kwargs", {})
            if not isinstance(args, list) or not isinstance(kwargs, Mapping):
                raise VerifierError(f"{where}: args must be a list and kwargs a mapping")
            calls.append({"args": args, "kwargs": dict(kwargs)})
            expected.append(test["expected"])
        else:
            raise VerifierError(f"{where}: expected a text with asserts, input and output, or args and expected")
    if calls and not (isinstance(entry_point, str) and entry_point):
        raise VerifierError("python_code: tests with args need the field 'entry_point' (function or Class.method)")
    found = CodeTests(entry_point=str(entry_point), calls=calls, expected=expected, asserts=asserts, programs=programs)
    if not len(found):
        raise VerifierError("python_code: no text in the field 'tests' contains an assert")
    return found


def same_value(expected: Any, got: Any, tolerance: float = 0.0) -> bool:
    """Compare JSON values, floats with a tolerance (1e-6 relative or more, or 1e-9 of an expected 0); true is not 1."""
    if isinstance(expected, bool) or isinstance(got, bool):
        return expected is got
    if isinstance(expected, int | float) and isinstance(got, int | float):
        if isinstance(expected, int) and isinstance(got, int):
            return expected == got
        try:
            absolute = tolerance or (0.0 if expected else 1e-9)
            return math.isclose(expected, got, rel_tol=max(1e-6, tolerance), abs_tol=absolute)
        except OverflowError:  # a whole number beyond all floats
            return False
    if isinstance(expected, list) and isinstance(got, list):
        return len(expected) == len(got) and all(
            same_value(wanted, item, tolerance) for wanted, item in zip(expected, got, strict=True)
        )
    if isinstance(expected, Mapping) and isinstance(got, Mapping):
        return expected.keys() == got.keys() and all(same_value(expected[key], got[key], tolerance) for key in expected)
    return bool(expected == got)


def same_output(expected: str, got: str, tolerance: float = 0.0) -> bool:
    """Compare printed text, ignoring spaces at line ends and blank lines at the end.

    With a tolerance, decimal numbers of which one has a fraction or an exponent may differ by at most that much, or by
    that share of the expected one.
    """
    wanted, lines = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (expected, got))
    if tolerance == 0 or len(wanted) != len(lines):
        return wanted == lines
    for line, found in zip(wanted, lines, strict=True):
        words, found_words = ([part.split() for part in _DECIMAL.split(text)] for text in (line, found))
        numbers = zip(_DECIMAL.findall(line), _DECIMAL.findall(found), strict=False)
        if words != found_words or not all(a == b or _close(a, b, tolerance) for a, b in numbers):
            return False
    return True


def read_value(encoded: Any) -> Any:
    """Return one value that ``code_runner`` reports; an object of another type becomes one that equals no other.

    Raises any Exception for a report that the runner would not write.
    """
    if isinstance(encoded, list):
        return [read_value(item) for item in encoded]
    if isinstance(encoded, dict):
        ((kind, content),) = encoded.items()
        return _READERS[kind](content)
    return encoded


def _close(expected: str, got: str, tolerance: float) -> bool:
    if not {".", "e", "E"} & {*expected, *got}:
        return False  # whole numbers
    difference = abs(Fraction(expected) - Fraction(got))
    return difference <= Fraction(tolerance) * max(Fraction(1), abs(Fraction(expected)))


def _lines(value: Any, where: str) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value) + "\n"
    if not isinstance(value, str):
        raise VerifierError(f"{where}: input and output must be text or lists of lines, got {type(value).__name__}")
    return value


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "tuple": lambda items: tuple(map(read_value, items)),
    "set": lambda items: set(map(read_value, items)),
    "frozenset": lambda items: frozenset(map(read_value, items)),
    "dict": lambda pairs: {read_value(key): read_value(value) for key, value in pairs},
    "iterator": lambda items: iter([read_value(item) for item in items]),
    "range": lambda bounds: range(*bounds),
    "bytes": bytes.fromhex,
    "complex": lambda parts: complex(*parts),
    "Decimal": Decimal,
    "Fraction": Fraction,
    "other": lambda _: object(),
}
