"""Calculator tool, the only built-in environment.

The policy writes ``<calc>12 * 7</calc>`` and receives ``<result>84</result>``. A turn without a call ends the episode,
and the verifier scores the whole response. The text is untrusted: its arithmetic is exact, bounded in size and time,
without names, calls or attributes.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction

from rollmesh.errors import ConfigError
from rollmesh.tasks.environments.environment_protocol import EnvironmentReply
from rollmesh.tasks.verifiers.extraction import last_tag
from rollmesh.types import Prompt

LONGEST_EXPRESSION = 200
"""Limit in characters."""
DEEPEST_EXPRESSION = 50
"""Limit of nested operations."""
LARGEST_EXPONENT = 1_000
LARGEST_BITS = 4_096
"""Limit for the numerator and the denominator of any intermediate value."""
_ALPHABET = re.compile(r"[0-9eE+\-*/%^().\s]*")
_EXPONENT = re.compile(r"[eE]([+-]?\d+)$")
_OPERATIONS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNDERSTOOD = "only numbers, + - * / // % ** and parentheses are understood"
_EXPONENTS = f"exponents are whole numbers up to {LARGEST_EXPONENT}"


class CalculatorEnvironment:
    """Evaluator of the last closed ``<calc>...</calc>`` of each turn; stateless, so replayable and idempotent."""

    replayable = True

    def __init__(self, reply: str = "<result>{result}</result>", tag: str = "calc") -> None:
        """Create a calculator.

        ``reply`` is the text around {result}, for example with the turn markers of a chat model; ``tag`` marks a call.
        Raises ConfigError if the reply does not contain {result}, or if the tag is not an identifier.
        """
        if "{result}" not in reply:
            raise ConfigError(f"rollout.environment_options.reply: {reply!r} must contain {{result}}")
        if not tag.isidentifier():
            raise ConfigError(f"rollout.environment_options.tag: {tag!r} must be an identifier")
        self._reply, self._tag = reply, tag

    async def reset(self, prompt: Prompt) -> None:
        """Do nothing: the calculator keeps no state."""

    async def step(self, response_text: str, idempotency_key: str) -> EnvironmentReply:
        expression = last_tag(response_text, self._tag)
        if expression is None:
            return EnvironmentReply(text="", done=True)
        try:
            result = format_value(evaluate(expression))
        except ArithmeticRejected as error:
            result = f"error: {error}"
        return EnvironmentReply(text=self._reply.replace("{result}", result), done=False)

    async def aclose(self) -> None:
        """Do nothing: the calculator holds no resources."""


class ArithmeticRejected(ValueError):
    """The text is not arithmetic, or its value is too large."""


def evaluate(expression: str) -> Fraction:
    """Return the exact value of ``+ - * / // % **`` over decimals and parentheses. Raises ArithmeticRejected."""
    text = expression.strip().replace("^", "**")
    if not text or len(text) > LONGEST_EXPRESSION:
        raise ArithmeticRejected(f"expected 1 to {LONGEST_EXPRESSION} characters, got {len(text)}")
    if not _ALPHABET.fullmatch(text):
        raise ArithmeticRejected(_UNDERSTOOD)
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
    match node:
        case ast.Constant(value=int() | float()):
            # Read the digits of the text: 0.1 is one tenth, not the nearest float.
            digits = ast.get_source_segment(text, node) or ""
            exponent = _EXPONENT.search(digits)
            if exponent is not None and abs(int(exponent[1])) > LARGEST_EXPONENT:
                raise ArithmeticRejected(_EXPONENTS)
            return _bounded(Fraction(digits))
        case ast.Constant():
            raise ArithmeticRejected("only decimal numbers are understood")
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign):
            operand = _value(node.operand, text, depth + 1)
            return -operand if isinstance(sign, ast.USub) else operand
        case ast.BinOp(op=operation):
            left, right = _value(node.left, text, depth + 1), _value(node.right, text, depth + 1)
            if isinstance(operation, ast.Pow):
                return _bounded(_power(left, right))
            if (compute := _OPERATIONS.get(type(operation))) is not None:
                if right == 0 and isinstance(operation, ast.Div | ast.FloorDiv | ast.Mod):
                    raise ArithmeticRejected("division by zero")
                return _bounded(Fraction(compute(left, right)))
    raise ArithmeticRejected(_UNDERSTOOD)


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > LARGEST_EXPONENT:
        raise ArithmeticRejected(_EXPONENTS)
    if base == 0 and exponent < 0:
        raise ArithmeticRejected("division by zero")
    # Rejected before it is computed: the power has about bits * exponent bits.
    if _bits(base) * abs(exponent) > 2 * LARGEST_BITS:
        raise ArithmeticRejected("the result is too large")
    return Fraction(base ** int(exponent))


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > LARGEST_BITS:
        raise ArithmeticRejected("the result is too large")
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())
