"""The scripts of docs/environments.md that write the tasks of a verifiers environment and serve it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .environments import python_of

TESTS = Path(__file__).parents[1]
DOCUMENT = TESTS.parent / "docs" / "environments.md"


def document_script(name: str, module: str, token: str = "", **changes: str) -> dict[str, Any]:
    """Arguments of a process that runs a script of the document, with texts in it replaced, on a tests' module."""
    code = DOCUMENT.read_text().split(f"<!-- {name} -->")[1].split("```python\n")[1].split("```")[0]
    for before, after in changes.items():
        assert before in code
        code = code.replace(before, after)
    variables = {"PYTHONPATH": str(TESTS / "environments"), "ROLLMESH_API_KEY": token, "OMP_NUM_THREADS": "1"}
    return {"args": [str(python_of("verifiers")), "-c", code, module], "env": {**os.environ, **variables}}


@contextmanager
def verifiers_server(address: str, module: str, token: str, log: Path) -> Iterator[None]:
    """An environment server with the taskset and the harness of a module; it is killed at the end."""
    with log.open("ab") as file:
        script = document_script("serve", module, token, **{"tcp://127.0.0.1:5000": address, "null": module})
        process = subprocess.Popen(**script, stdout=file, stderr=file)
    try:
        yield
    finally:
        process.kill()
        process.wait()
