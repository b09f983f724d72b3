"""Splitting of ``assert`` tests: the answer's process computes values, and this process compares them.

Calls of the answer become steps that run in the sandbox; each reports a plain value. The rest of the assert (constants,
comparisons, arithmetic, a few functions) is evaluated in this process, over those values. So no expected value reaches
the answer's process, and no code in the sandbox can decide a comparison.
"""

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
_LOCAL_NAMES: dict[str, Any] = {function.__name__: function for function in (*_TYPES, *_FUNCTIONS, sum, type, zip)} | {
    "math": math,
    "isclose": math.isclose,
    "Counter": Counter,
    "OrderedDict": OrderedDict,
    "Decimal": Decimal,
    "Fraction": Fraction,
}
"""Names with the same meaning in every test, evaluated in this process."""

_CONVERTERS = frozenset(
    {"bool", "dict", "float", "int", "len", "list", "repr", "round", "set", "sorted", "str", "sum", "tuple"}
)
"""Functions that may run in the sandbox if a value of the answer is their only argument; this process compares the
result."""

_SANDBOX_BUILTINS = frozenset({"callable", "hasattr", "hash", "issubclass", "iter", "next", "repr"})
"""Other built-in functions that run in the sandbox."""

_FORBIDDEN = frozenset(dir(builtins)) - _SANDBOX_BUILTINS
"""Built-in names that tests cannot use, except those in ``_LOCAL_NAMES``."""

# fmt: off
_LOCAL_METHODS = frozenset((
    "endswith", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isdisjoint", "isidentifier", "islower",
    "isnumeric", "isspace", "issubset", "issuperset", "istitle", "isupper", "join", "lower", "startswith", "strip",
    "upper",
))
# fmt: on
"""Methods of text and sets that return a comparison, or that are called on a constant."""

_PLAIN_NODES = (
    ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.IfExp, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Subscript,
    ast.Slice, ast.Starred, ast.keyword, ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
    ast.comprehension, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp,
)  # fmt: skip
_VALUE = "_value_"
_LONGEST_LOOP = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class AssertTest:
    """One test text: steps for the sandbox, and comparisons of the reported values."""

    steps: tuple[Step, ...]
    checks: tuple[CodeType, ...]
    """Compiled comparisons; empty for a text without an assert, which is set-up for the texts after it."""

    def passes(self, values: Sequence[Any]) -> bool:
        """Return True if every assert holds for the reported values, one for each ``value`` step."""
        names = {f"{_VALUE}{number}": value for number, value in enumerate(values)}
        try:
            return all(eval(check, {"__builtins__": {}, **_LOCAL_NAMES, **names}) for check in self.checks)
        except Exception:  # the assert would raise too, for example for types that do not compare or a missing key
            return False


def split_asserts(text: str, entry_point: str, where: str) -> AssertTest:
    """Split one test text. Raises VerifierError with the test for a form that cannot be split."""
    try:
        statements = list(_flat(ast.parse(text).body, entry_point))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise VerifierError(f"{where}: {text[:80]!r} is not Python: {error}") from error
    if not any(isinstance(statement, ast.Assert) for statement in statements):
        _reject_hidden_asserts(statements, where)
        return AssertTest(steps=tuple(("run", ast.unparse(statement)) for statement in statements), checks=())
    constants = _constants(statements)
    answer_names = frozenset(_stored(statements).keys() - constants.keys()) | {entry_point}
    while True:
        split = _Split(statements, constants, answer_names, where)
        changeable = {n for n in split.sandbox_names & constants.keys() if not isinstance(constants[n], ast.Constant)}
        if not changeable and split.shadowed <= answer_names:
            return split.test()
        constants = {name: value for name, value in constants.items() if name not in changeable}
        answer_names |= changeable | split.shadowed


class _Split:
    """Steps and checks of one text, with the names in ``constants`` replaced by their values."""

    def __init__(
        self, statements: Sequence[ast.stmt], constants: dict[str, ast.expr], answer_names: frozenset[str], where: str
    ) -> None:
        """Split the statements; ``answer_names`` belong to the answer or to the set-up of the test in any case."""
        self._constants = constants
        self._answer_names = answer_names
        self._where = where
        self._steps: list[Step] = []
        self._checks: list[CodeType] = []
        self._value_count = 0
        self._test_names = {name for statement in statements for name in _defined(statement)}
        self.sandbox_names: set[str] = set()
        """Names that the steps read."""
        self.shadowed: set[str] = set()
        """Functions of asserts that call no other function of the answer: ``sum(10, 15)`` must be the answer's sum."""
        for statement in statements:
            if isinstance(statement, ast.Assert):
                check = ast.Expression(self._local(statement.test, frozenset(), truth=True))
                self._checks.append(compile(ast.fix_missing_locations(check), where, "eval"))
                if _is_known(check):
                    self.shadowed |= _called(check)
            elif _assigned_name(statement) not in constants:
                _reject_hidden_asserts([statement], where)
                self._step("run", statement)

    def test(self) -> AssertTest:
        used = sorted(self.sandbox_names & self._constants.keys())
        setup: list[Step] = [("run", f"{name} = {ast.unparse(self._constants[name])}") for name in used]
        return AssertTest(steps=(*setup, *self._steps), checks=tuple(self._checks))

    def _step(self, kind: Literal["run", "value"], node: ast.AST, *, truth: bool = False) -> None:
        self.sandbox_names |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        text = ast.unparse(node)
        self._steps.append((kind, f"bool({text})" if truth else text))

    def _local(self, node: ast.AST, bound: frozenset[str], *, truth: bool = False) -> Any:
        """Return ``node`` for evaluation in this process, with placeholders for values of the answer."""
        if isinstance(node, ast.expr) and self._in_sandbox(node, bound):
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
            raise self._error(node, "is a form that cannot be evaluated outside the answer's process")
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
        return self._local(value, bound, truth=truth) if isinstance(value, ast.AST) else value

    def _call(self, node: ast.Call, bound: frozenset[str]) -> ast.Call:
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in _LOCAL_METHODS:
            function = ast.Attribute(self._local(function.value, bound), function.attr, ast.Load())
        elif not _is_of_math(function) and not (isinstance(function, ast.Name) and function.id in _LOCAL_NAMES):
            raise self._error(function, "cannot be called outside the answer's process")
        arguments = [self._local(argument, bound) for argument in node.args]
        named = [ast.keyword(k.arg, self._local(k.value, bound)) for k in node.keywords]
        if ast.unparse(function) in ("math.isclose", "isclose") and not any(map(_is_known, arguments)):
            raise self._error(node, "compares values that all come from the answer")
        return ast.Call(function, arguments, named)

    def _value(self, node: ast.expr, bound: frozenset[str], truth: bool) -> ast.Name:
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        if names & bound:
            raise self._error(node, f"depends on the loop variable {min(names & bound)!r}")
        self._reject_comparisons(node)
        root = _root(node)
        if truth and root in self._test_names:
            raise self._error(node, f"{root!r} is defined by the test and would compare inside the answer's process")
        self._step("value", node, truth=truth)
        self._value_count += 1
        return ast.Name(f"{_VALUE}{self._value_count - 1}", ast.Load())

    def _reject_comparisons(self, node: ast.expr) -> None:
        """Raise for an expression in which the answer's process would compare a value of the answer."""
        bound = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        bound |= {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
        for child in ast.walk(node):
            match child:
                case ast.Compare(left=left, comparators=others):
                    compares = any(self._in_sandbox(side, frozenset(bound)) for side in (left, *others))
                case ast.Call(func=ast.Attribute(attr=method)):
                    compares = method.startswith("__")
                case ast.Call(func=ast.Name(id=name), args=[ast.GeneratorExp(), *_]):
                    compares = name in _SANDBOX_BUILTINS
                case _:
                    compares = False
            if compares:
                raise self._error(node, "would compare inside the answer's process")

    def _in_sandbox(self, node: ast.expr, bound: frozenset[str]) -> bool:
        """Return True if the answer's process computes ``node``."""
        match node:
            case ast.Name(id=name):
                if name in self._answer_names:
                    return True
                if name in bound or name in self._constants or name in _LOCAL_NAMES:
                    return False
                if name in _FORBIDDEN:
                    raise self._error(node, "is a built-in name that tests cannot use")
                return True
            case ast.Attribute(value=value) | ast.Subscript(value=value):
                return self._in_sandbox(value, bound)
            case ast.Call(func=ast.Attribute(value=value, attr=method)):
                return method not in _LOCAL_METHODS and self._in_sandbox(value, bound)
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, _] as args):
                return all(self._in_sandbox(argument, bound) for argument in args)
            case ast.Call(func=ast.Name(id=name), args=[value, *rest]) if name in _CONVERTERS - self._answer_names:
                alone = not rest or (name == "round" and len(rest) == 1)
                return alone and self._in_sandbox(value, bound)
            case ast.Call(func=ast.Name() as function):
                return self._in_sandbox(function, bound)
        return False

    def _error(self, node: ast.AST, why: str) -> VerifierError:
        return VerifierError(
            f"{self._where}: {ast.unparse(node)[:80]!r} {why}; write the test as a comparison of the answer's value "
            "with a constant, or as {args, expected} with entry_point"
        )


def _flat(body: Sequence[ast.stmt], entry_point: str) -> Iterator[ast.stmt]:
    """Yield the statements of a text, with loops over constants unrolled.

    ``def check(candidate): ...`` is replaced by its body, for ``check(f)`` or, as in HumanEval, for the entry point.
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
    """Yield the body once for each item, which replaces the loop variable; yield the loop where that is impossible."""
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
            pairs = [_named(name, value) for name, value in zip(targets, items, strict=True)]
            return {name: value for pair in pairs for name, value in pair.items()} if all(pairs) else None  # type: ignore[union-attr]
    return None


class _Substitute(ast.NodeTransformer):
    """Replacement of names by values."""

    def __init__(self, values: dict[str, ast.expr]) -> None:
        self._values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Return the value of a name, or the node for a name without a value."""
        return self._values.get(node.id, node) if isinstance(node.ctx, ast.Load) else node


def _inlined(function: ast.FunctionDef, argument: ast.expr) -> Iterator[ast.stmt]:
    target = ast.Name(function.args.args[0].arg, ast.Store())
    yield ast.fix_missing_locations(ast.Assign([target], argument))
    yield from _flat(function.body, "")


def _stored(statements: Sequence[ast.stmt]) -> Counter[str]:
    """Count the bindings of each name outside asserts."""
    nodes = (node for s in statements if not isinstance(s, ast.Assert) for node in ast.walk(s))
    return Counter(n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load))


def _constants(statements: Sequence[ast.stmt]) -> dict[str, ast.expr]:
    """Return the names that are assigned once, to a constant."""
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
    """Yield the names of functions, classes and modules that a statement defines."""
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in names)
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Lambda()):
            yield name


def _has_assert(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.Assert) for node in ast.walk(statement))


def _reject_hidden_asserts(statements: Sequence[ast.stmt], where: str) -> None:
    for statement in filter(_has_assert, statements):
        raise VerifierError(
            f"{where}: {ast.unparse(statement)[:80]!r} contains an assert inside another statement, which cannot be "
            "compared outside the answer's process; write each assert as a separate statement"
        )
