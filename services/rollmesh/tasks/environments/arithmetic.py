"""Safe arithmetic for untrusted text: exact, bounded in size and time, without names, calls or attributes."""

from __future__ import annotations

import ast
import re
from fractions import Fraction

LONGEST_EXPRESSION = 200
"""Limit in characters."""
DEEPEST_EXPRESSION = 50
"""Limit of nested operations."""
LARGEST_EXPONENT = 1_000
LARGEST_BITS = 4_096
"""Limit for the numerator and the denominator of any intermediate value."""

_ALPHABET = re.compile(r"[0-9eE+\-*/%^().\s]*")
_EXPONENT = re.compile(r"[eE]([+-]?\d+)$")


class ArithmeticRejected(ValueError):
    """The text is not arithmetic, or its value is too large."""


def evaluate(expression: str) -> Fraction:
    """Return the exact value of ``+ - * / // % **`` over decimals and parentheses. Raises ArithmeticRejected."""
    text = expression.strip().replace("^", "**")
    if not text or len(text) > LONGEST_EXPRESSION:
        raise ArithmeticRejected(f"expected 1 to {LONGEST_EXPRESSION} characters, got {len(text)}")
    if not _ALPHABET.fullmatch(text):
        raise ArithmeticRejected("only numbers, + - * / // % ** and parentheses are understood")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ArithmeticRejected("not an arithmetic expression") from error
    return _value(tree.body, text, 0)


def format_value(value: Fraction) -> str:
    """Format a value as a whole number, or with at most 10 significant digits."""
    if value.denominator == 1:
        return str(value.numerator)
    try:
        return f"{float(value):.10g}"
    except OverflowError:
        return f"{value.numerator // value.denominator}"


def _value(node: ast.expr, text: str, depth: int) -> Fraction:
    if depth > DEEPEST_EXPRESSION:
        raise ArithmeticRejected(f"more than {DEEPEST_EXPRESSION} nested operations")
    if isinstance(node, ast.Constant):
        return _number(node, text)
    if isinstance(node, ast.UnaryOp):
        operand = _value(node.operand, text, depth + 1)
        if isinstance(node.op, ast.USub):
            return -operand
        if isinstance(node.op, ast.UAdd):
            return operand
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, text, depth + 1), _value(node.right, text, depth + 1)
        return _bounded(_combine(node.op, left, right))
    raise ArithmeticRejected("only numbers, + - * / // % ** and parentheses are understood")


def _number(node: ast.Constant, text: str) -> Fraction:
    if isinstance(node.value, bool) or not isinstance(node.value, int | float):
        raise ArithmeticRejected("only decimal numbers are understood")
    # Read the digits of the text: 0.1 is one tenth, not the nearest float.
    digits = ast.get_source_segment(text, node) or ""
    exponent = _EXPONENT.search(digits)
    if exponent is not None and abs(int(exponent[1])) > LARGEST_EXPONENT:
        raise ArithmeticRejected(f"exponents are whole numbers up to {LARGEST_EXPONENT}")
    return _bounded(Fraction(digits))


def _combine(operation: ast.operator, left: Fraction, right: Fraction) -> Fraction:
    match operation:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div() | ast.FloorDiv() | ast.Mod() if right == 0:
            raise ArithmeticRejected("division by zero")
        case ast.Div():
            return left / right
        case ast.FloorDiv():
            return Fraction(left // right)
        case ast.Mod():
            return left % right
        case ast.Pow():
            return _power(left, right)
    raise ArithmeticRejected("only numbers, + - * / // % ** and parentheses are understood")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent.numerator) > LARGEST_EXPONENT:
        raise ArithmeticRejected(f"exponents are whole numbers up to {LARGEST_EXPONENT}")
    if base == 0 and exponent < 0:
        raise ArithmeticRejected("division by zero")
    # Rejected before it is computed: the power has about bits * exponent bits.
    if _bits(base) * abs(exponent.numerator) > 2 * LARGEST_BITS:
        raise ArithmeticRejected("the result is too large")
    return Fraction(base ** int(exponent))


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > LARGEST_BITS:
        raise ArithmeticRejected("the result is too large")
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())
