"""The scripts of docs/environments.md that write the tasks of a verifiers environment and serve it."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .environments import python_of

TESTS = Path(__file__).parents[1]
DOCUMENT = TESTS.parent / "docs" / "environments.md"


def script(code: str, *arguments: str, token: str) -> dict[str, Any]:
    """Arguments of a process that runs a script in the environment of verifiers, which finds the tests' modules."""
    variables = {"PYTHONPATH": str(TESTS / "environments"), "ROLLMESH_API_KEY": token, "OMP_NUM_THREADS": "1"}
    return {"args": [str(python_of("verifiers")), "-c", code, *arguments], "env": {**os.environ, **variables}}


def document_script(name: str, module: str, token: str = "", **changes: str) -> dict[str, Any]:
    """Arguments of a process that runs a script of the document, with texts in it replaced, on a tests' module."""
    code = DOCUMENT.read_text().split(f"<!-- {name} -->")[1].split("```python\n")[1].split("```")[0]
    for before, after in changes.items():
        assert before in code
        code = code.replace(before, after)
    return script(code, module, token=token)


@contextmanager
def verifiers_server(
    address: str, module: str, token: str, log: Path, harness: str = "", **changes: str
) -> Iterator[None]:
    """An environment server with the taskset of a module, and its harness or another; it is killed at the end."""
    with log.open("ab") as file:
        changes |= {"tcp://127.0.0.1:5000": address, "null": harness or module}
        process = subprocess.Popen(**document_script("serve", module, token, **changes), stdout=file, stderr=file)
    try:
        yield
    finally:
        process.kill()
        process.wait()
