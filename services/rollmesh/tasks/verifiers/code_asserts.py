"""Split ``assert`` tests, so that the answer computes values and this process compares them.

Calls of the answer become steps that run in the sandbox; each reports a plain value. Everything else of the assert
(constants, comparisons, arithmetic, a few functions) is evaluated here, over those values. So nothing that is expected
reaches the answer's process, and nothing that runs there can decide a comparison.
"""

from __future__ import annotations

import ast
import builtins
import copy
import math
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from types import CodeType
from typing import Any, Literal

from rollmesh.errors import VerifierError

Step = tuple[Literal["run", "value"], str]
"""Code for the sandbox: a statement, or an expression whose value is reported."""

_TYPES = (bool, bytes, complex, dict, float, frozenset, int, list, range, set, str, tuple)
_FUNCTIONS = (abs, all, any, divmod, enumerate, filter, isinstance, len, map, max, min, pow, reversed, round, sorted)
_HERE: dict[str, Any] = {function.__name__: function for function in (*_TYPES, *_FUNCTIONS, sum, type, zip)} | {
    "math": math,
    "isclose": math.isclose,
    "Counter": Counter,
    "OrderedDict": OrderedDict,
    "Decimal": Decimal,
    "Fraction": Fraction,
}
"""Names that mean the same in every test and are evaluated here."""

_CONVERTERS = frozenset(
    {"bool", "dict", "float", "int", "len", "list", "repr", "round", "set", "sorted", "str", "sum", "tuple"}
)
"""Functions that may run beside the answer when its value is all they are given: their result is compared here."""

_BUILTINS_THERE = frozenset({"callable", "hasattr", "hash", "issubclass", "iter", "next", "repr"})
"""Other built-in functions that run beside the answer."""

_FORBIDDEN = frozenset(dir(builtins)) - _BUILTINS_THERE
"""Built-in names that tests cannot use unless ``_HERE`` has them."""

# fmt: off
_METHODS_HERE = frozenset((
    "endswith", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isdisjoint", "isidentifier", "islower",
    "isnumeric", "isspace", "issubset", "issuperset", "istitle", "isupper", "join", "lower", "startswith", "strip",
    "upper",
))
# fmt: on
"""Methods of text and sets that answer with a comparison, or are called on a constant."""

_PLAIN_NODES = (
    ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.IfExp, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Subscript,
    ast.Slice, ast.Starred, ast.keyword, ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
    ast.comprehension, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp,
)  # fmt: skip
_VALUE = "_value_"
_LONGEST_LOOP = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class AssertTest:
    """One test text: steps for the sandbox, and the comparisons of what they report."""

    steps: tuple[Step, ...]
    checks: tuple[CodeType, ...]
    """Empty for a text without an assert: set-up for the texts after it."""

    def passes(self, values: Sequence[Any]) -> bool:
        """Whether every assert holds for the reported values, one for each ``value`` step."""
        names = {f"{_VALUE}{number}": value for number, value in enumerate(values)}
        try:
            return all(eval(check, {"__builtins__": {}, **_HERE, **names}) for check in self.checks)
        except Exception:  # as the assert itself would have raised: types that do not compare, a missing key
            return False


def split_asserts(text: str, entry_point: str, where: str) -> AssertTest:
    """Split one test text; raises VerifierError naming the test for a form that cannot be split."""
    try:
        statements = list(_flat(ast.parse(text).body, entry_point))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise VerifierError(f"{where}: {text[:80]!r} is not Python: {error}") from error
    if not any(isinstance(statement, ast.Assert) for statement in statements):
        _refuse_hidden_asserts(statements, where)
        return AssertTest(steps=tuple(("run", ast.unparse(statement)) for statement in statements), checks=())
    constants = _constants(statements)
    there = frozenset(_stored(statements).keys() - constants.keys()) | {entry_point}
    while True:
        split = _Split(statements, constants, there, where)
        changeable = {n for n in split.names_there & constants.keys() if not isinstance(constants[n], ast.Constant)}
        if not changeable and split.shadowed <= there:
            return split.test()
        constants = {name: value for name, value in constants.items() if name not in changeable}
        there |= changeable | split.shadowed


class _Split:
    """The steps and checks of one text, with the names in ``constants`` replaced by their values."""

    def __init__(
        self, statements: Sequence[ast.stmt], constants: dict[str, ast.expr], there: frozenset[str], where: str
    ) -> None:
        """``there``: names that belong to the answer or to the test's set-up, whatever they mean elsewhere."""
        self._constants = constants
        self._there = there
        self._where = where
        self._steps: list[Step] = []
        self._checks: list[CodeType] = []
        self._value_count = 0
        self._own_names = {name for statement in statements for name in _defined(statement)}
        self.names_there: set[str] = set()
        """Names that the steps read."""
        self.shadowed: set[str] = set()
        """Functions called by an assert that calls nothing of the answer: ``sum(10, 15)`` must be the answer's sum."""
        for statement in statements:
            if isinstance(statement, ast.Assert):
                check = ast.Expression(self._here(statement.test, frozenset(), truth=True))
                self._checks.append(compile(ast.fix_missing_locations(check), where, "eval"))
                if _is_known(check):
                    self.shadowed |= _called(check)
            elif _assigned_name(statement) not in constants:
                _refuse_hidden_asserts([statement], where)
                self._step("run", statement)

    def test(self) -> AssertTest:
        """The finished test."""
        used = sorted(self.names_there & self._constants.keys())
        setup: list[Step] = [("run", f"{name} = {ast.unparse(self._constants[name])}") for name in used]
        return AssertTest(steps=(*setup, *self._steps), checks=tuple(self._checks))

    def _step(self, kind: Literal["run", "value"], node: ast.AST, *, truth: bool = False) -> None:
        self.names_there |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        text = ast.unparse(node)
        self._steps.append((kind, f"bool({text})" if truth else text))

    def _here(self, node: ast.AST, bound: frozenset[str], *, truth: bool = False) -> Any:
        """``node`` as it is evaluated here, with placeholders for values of the answer."""
        if isinstance(node, ast.expr) and self._is_there(node, bound):
            return self._value(node, bound, truth)
        if isinstance(node, ast.Constant):
            return node
        if isinstance(node, ast.Name):
            return self._constants.get(node.id, node)
        if _is_of_math(node):
            return node
        if isinstance(node, ast.Call):
            return self._call(node, bound)
        if not isinstance(node, _PLAIN_NODES):
            raise self._error(node, "is a form that cannot be evaluated outside of the answer's process")
        generators = getattr(node, "generators", ())
        inner = bound | {n.id for g in generators for n in ast.walk(g.target) if isinstance(n, ast.Name)}
        truth = (truth and isinstance(node, ast.BoolOp)) or isinstance(getattr(node, "op", None), ast.Not)
        fields = {name: self._field(value, inner, truth) for name, value in ast.iter_fields(node)}
        if isinstance(node, ast.Compare) and not any(map(_is_known, (fields["left"], *fields["comparators"]))):
            raise self._error(node, "compares values that all come from the answer")
        return type(node)(**fields)

    def _field(self, value: Any, bound: frozenset[str], truth: bool) -> Any:
        if isinstance(value, list):
            return [self._field(item, bound, truth) for item in value]
        return self._here(value, bound, truth=truth) if isinstance(value, ast.AST) else value

    def _call(self, node: ast.Call, bound: frozenset[str]) -> ast.Call:
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in _METHODS_HERE:
            function = ast.Attribute(self._here(function.value, bound), function.attr, ast.Load())
        elif not _is_of_math(function) and not (isinstance(function, ast.Name) and function.id in _HERE):
            raise self._error(function, "cannot be called outside of the answer's process")
        arguments = [self._here(argument, bound) for argument in node.args]
        named = [ast.keyword(k.arg, self._here(k.value, bound)) for k in node.keywords]
        if ast.unparse(function) in ("math.isclose", "isclose") and not any(map(_is_known, arguments)):
            raise self._error(node, "compares values that all come from the answer")
        return ast.Call(function, arguments, named)

    def _value(self, node: ast.expr, bound: frozenset[str], truth: bool) -> ast.Name:
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        if names & bound:
            raise self._error(node, f"depends on the loop variable {min(names & bound)!r}")
        self._refuse_judges(node)
        root = _root(node)
        if truth and root in self._own_names:
            raise self._error(node, f"{root!r} is the test's own and would judge inside of the answer's process")
        self._step("value", node, truth=truth)
        self._value_count += 1
        return ast.Name(f"{_VALUE}{self._value_count - 1}", ast.Load())

    def _refuse_judges(self, node: ast.expr) -> None:
        """Raise for an expression in which the answer's process would compare a value of the answer."""
        own = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        own |= {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
        for part in ast.walk(node):
            match part:
                case ast.Compare(left=left, comparators=others):
                    judges = any(self._is_there(side, frozenset(own)) for side in (left, *others))
                case ast.Call(func=ast.Attribute(attr=method)):
                    judges = method.startswith("__")
                case ast.Call(func=ast.Name(id=name), args=[ast.GeneratorExp(), *_]):
                    judges = name in _BUILTINS_THERE
                case _:
                    judges = False
            if judges:
                raise self._error(node, "would compare inside of the answer's process")

    def _is_there(self, node: ast.expr, bound: frozenset[str]) -> bool:
        """Whether the answer's process computes ``node``."""
        match node:
            case ast.Name(id=name):
                if name in self._there:
                    return True
                if name in bound or name in self._constants or name in _HERE:
                    return False
                if name in _FORBIDDEN:
                    raise self._error(node, "is a built-in name that tests cannot use")
                return True
            case ast.Attribute(value=value) | ast.Subscript(value=value):
                return self._is_there(value, bound)
            case ast.Call(func=ast.Attribute(value=value, attr=method)):
                return method not in _METHODS_HERE and self._is_there(value, bound)
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, _] as args):
                return all(self._is_there(argument, bound) for argument in args)
            case ast.Call(func=ast.Name(id=name), args=[value, *rest]) if name in _CONVERTERS - self._there:
                alone = not rest or (name == "round" and len(rest) == 1)
                return alone and self._is_there(value, bound)
            case ast.Call(func=ast.Name() as function):
                return self._is_there(function, bound)
        return False

    def _error(self, node: ast.AST, why: str) -> VerifierError:
        return VerifierError(
            f"{self._where}: {ast.unparse(node)[:80]!r} {why}; write the test as a comparison of the answer's value "
            "with a constant, or as {args, expected} with entry_point"
        )


def _flat(body: Sequence[ast.stmt], entry_point: str) -> Iterator[ast.stmt]:
    """The statements of a text, with loops over constants unrolled.

    ``def check(candidate): ...`` with ``check(f)``, or for the entry point, as HumanEval has it, is its body.
    """
    checks: dict[str, ast.FunctionDef] = {}
    constants = _constants(body)
    for statement in body:
        match statement:
            case ast.For(iter=ast.Name(id=name)) if name in constants and _has_assert(statement):
                yield from _unrolled(statement, constants[name])
            case ast.For() if _has_assert(statement):
                yield from _unrolled(statement, statement.iter)
            case ast.FunctionDef(args=ast.arguments(args=[_], defaults=[])) if _has_assert(statement):
                checks[statement.name] = statement
            case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=[argument], keywords=[])) if name in checks:
                yield from _inlined(checks.pop(name), argument)
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                continue
            case _:
                yield statement
    for function in checks.values():
        yield from _inlined(function, ast.Name(entry_point, ast.Load())) if entry_point.isidentifier() else [function]


def _unrolled(loop: ast.For, items: ast.expr) -> Iterator[ast.stmt]:
    """The body once for each item, which takes the place of its name; the loop itself where that is impossible."""
    match items:
        case ast.List(elts=found) | ast.Tuple(elts=found) if _is_literal(items):
            pass
        case ast.Call(func=ast.Name(id="range"), args=args, keywords=[]) if all(map(_is_literal, args)):
            bounds = [ast.literal_eval(argument) for argument in args]
            found = [ast.Constant(number) for number in islice(range(*bounds), _LONGEST_LOOP + 1)]
        case _:
            found = []
    named = [_named(loop.target, item) for item in found]
    if not 0 < len(found) <= _LONGEST_LOOP or None in named or loop.orelse:
        yield loop
        return
    for names in named:
        for statement in loop.body:
            yield from _flat([_Substitute(names or {}).visit(copy.deepcopy(statement))], "")


def _named(target: ast.expr, item: ast.expr) -> dict[str, ast.expr] | None:
    match target, item:
        case ast.Name(id=name), _:
            return {name: item}
        case ast.Tuple(elts=targets), ast.Tuple(elts=items) | ast.List(elts=items) if len(targets) == len(items):
            pairs = [_named(one, other) for one, other in zip(targets, items, strict=True)]
            return {name: value for pair in pairs for name, value in pair.items()} if all(pairs) else None  # type: ignore[union-attr]
    return None


class _Substitute(ast.NodeTransformer):
    """Puts values in the place of names."""

    def __init__(self, values: dict[str, ast.expr]) -> None:
        self._values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """The value of a name that has one."""
        return self._values.get(node.id, node) if isinstance(node.ctx, ast.Load) else node


def _inlined(function: ast.FunctionDef, argument: ast.expr) -> Iterator[ast.stmt]:
    target = ast.Name(function.args.args[0].arg, ast.Store())
    yield ast.fix_missing_locations(ast.Assign([target], argument))
    yield from _flat(function.body, "")


def _stored(statements: Sequence[ast.stmt]) -> Counter[str]:
    """How often each name is bound outside of asserts."""
    nodes = (node for s in statements if not isinstance(s, ast.Assert) for node in ast.walk(s))
    return Counter(n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load))


def _constants(statements: Sequence[ast.stmt]) -> dict[str, ast.expr]:
    """Names that are assigned once, and a constant."""
    stores = _stored(statements)
    found = {}
    for statement in statements:
        name = _assigned_name(statement)
        if name is not None and stores[name] == 1 and _is_literal(statement.value):  # type: ignore[attr-defined]
            found[name] = statement.value  # type: ignore[attr-defined]
    return found


def _assigned_name(statement: ast.stmt) -> str | None:
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name
    return None


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _is_known(node: ast.AST) -> bool:
    return not any(isinstance(n, ast.Name) and n.id.startswith(_VALUE) for n in ast.walk(node))


def _is_of_math(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="math"), attr=name):
            return not name.startswith("_")
    return False


def _called(node: ast.AST) -> set[str]:
    calls = (n.func for n in ast.walk(node) if isinstance(n, ast.Call))
    return {function.id for function in calls if isinstance(function, ast.Name)}


def _root(node: ast.expr) -> str:
    while not isinstance(node, ast.Name):
        node = node.func if isinstance(node, ast.Call) else node.value  # type: ignore[attr-defined]
    return node.id


def _defined(statement: ast.stmt) -> Iterator[str]:
    """Names of functions, classes and modules that a statement brings along."""
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in names)
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Lambda()):
            yield name


def _has_assert(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.Assert) for node in ast.walk(statement))


def _refuse_hidden_asserts(statements: Sequence[ast.stmt], where: str) -> None:
    for statement in filter(_has_assert, statements):
        raise VerifierError(
            f"{where}: {ast.unparse(statement)[:80]!r} holds an assert inside of another statement, which cannot be "
            "compared outside of the answer's process; write the asserts one by one"
        )
