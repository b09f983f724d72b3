"""Source text of the classes and type aliases that a user's code has to fit."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from types import ModuleType


def protocol_source(module: ModuleType, *names: str) -> str:
    """Return the definitions of a module's top-level names, with the docstrings below them, in the order of the file.

    A comment above them says how to import them.
    Raises LookupError for a name that the module does not define.
    """
    text = inspect.getsource(module)
    found = dict(_definitions(text))
    if missing := [name for name in names if name not in found]:
        raise LookupError(f"{module.__name__} defines no {missing[0]}")
    imported = f"# from {module.__name__} import {', '.join(names)}"
    return "\n\n\n".join((imported, *(found[name] for name in found if name in names)))


def _definitions(text: str) -> Iterator[tuple[str, str]]:
    lines = text.splitlines()
    body = ast.parse(text).body
    for at, node in enumerate(body):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                start = min((decorator.lineno for decorator in node.decorator_list), default=node.lineno)
                yield name, "\n".join(lines[start - 1 : node.end_lineno])
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                after = body[at + 1] if at + 1 < len(body) else node
                documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                yield name, "\n".join(lines[node.lineno - 1 : (after if documented else node).end_lineno])
