"""Runner inside the sandbox: loads an answer and runs its tests, with the standard library only.

It reads one JSON object from standard input: {"code": text, "prelude": text, "entry_point": text, "calls": [...],
"scripts": [[step, ...], ...]}. It writes one line per finished test to a private copy of standard output: the test's
number and a JSON result.

No expected value is sent to this process. An answer that takes this process over can report any value, as it could by
returning it; the comparison is made outside.
"""

import json
import os
import site
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice
from types import ModuleType
from typing import Any

LONGEST_ITERATOR = 100_000


def main() -> None:
    """Run one job."""
    report = os.fdopen(os.dup(1), "w", encoding="utf-8")
    job = json.loads(sys.stdin.buffer.read())
    quiet = os.open(os.devnull, os.O_RDWR)
    os.dup2(quiet, 0)
    os.dup2(quiet, 1)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    # Not __main__: tests call the functions of an answer, not its command line. Dataclasses and pickle need the module.
    module = sys.modules["answer"] = ModuleType("answer")
    namespace = vars(module)
    for add in (site.setquit, site.setcopyright, site.sethelper):  # as the start of an interpreter does
        add()
    exec(compile(job["prelude"], "prelude", "exec"), namespace)
    with suppress(Exception, SystemExit):  # tests of a missing function fail; the others count
        exec(compile(job["code"], "answer", "exec"), namespace)
    tests = [*((call, None) for call in job["calls"]), *((None, script) for script in job["scripts"])]
    for number, (call, script) in enumerate(tests):
        value = None
        try:
            if call is not None:
                value = find(namespace, job["entry_point"])(*call["args"], **call["kwargs"])
            else:
                value = run_script(namespace, script)
            result = json.dumps({"value": value})
        except (Exception, SystemExit) as error:
            result = json.dumps({"error": f"{type(error).__name__}: {error}"[:200]})
        report.write(f"{number} {result}\n")
        report.flush()


def find(namespace: dict[str, Any], entry_point: str) -> Any:
    """Return the function, or for Class.method the method of a new instance."""
    owner, _, method = entry_point.rpartition(".")
    return getattr(namespace[owner](), method) if owner else namespace[method]


def run_script(namespace: dict[str, Any], script: list[list[str]]) -> list[Any]:
    """Run the steps of one test; return the values of its expressions, in order."""
    values = []
    for kind, code in script:
        if kind == "run":
            exec(compile(code, "test", "exec"), namespace)
        else:
            values.append(plain(eval(compile(code, "test", "eval"), namespace)))
    return values


def plain(value: Any) -> Any:
    """Return a value as JSON that keeps its type; for objects of other types, the type's name only."""
    for kind, write in _WRITERS:
        if isinstance(value, kind):
            return write(value)
    for module, kind in (("decimal", "Decimal"), ("fractions", "Fraction")):
        # An answer with such a value has loaded the module; other answers do not pay for the import.
        if module in sys.modules and isinstance(value, getattr(sys.modules[module], kind)):
            return {kind: str(value)}
    if hasattr(value, "__iter__") and not isinstance(value, type):
        items = plain_items(islice(value, LONGEST_ITERATOR + 1))
        if len(items) <= LONGEST_ITERATOR:
            return {"iterator": items}
    return {"other": type(value).__name__}


def plain_items(values: Iterable[Any]) -> list[Any]:
    """Return each value as JSON."""
    return [plain(value) for value in values]


_WRITERS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    ((bool, str, type(None)), lambda value: value),
    (int, int),
    (float, float),
    (list, plain_items),
    (tuple, lambda value: {"tuple": plain_items(value)}),
    (set, lambda value: {"set": plain_items(value)}),
    (frozenset, lambda value: {"frozenset": plain_items(value)}),
    (dict, lambda value: {"dict": [plain_items(pair) for pair in value.items()]}),
    ((bytes, bytearray), lambda value: {"bytes": value.hex()}),
    (complex, lambda value: {"complex": [value.real, value.imag]}),
    (range, lambda value: {"range": [value.start, value.stop, value.step]}),
)


if __name__ == "__main__":
    main()
