"""Runs inside the sandbox, by itself and with nothing but the standard library: load an answer, answer its calls.

Reads one JSON object from standard input: {"code": text, "entry_point": text, "calls": [...], "statements": [...],
"nonce": text}. Writes one line per finished test to a private copy of standard output: the nonce, the test's number
and a JSON result. What is expected is never sent here, so it cannot be looked up.
"""

import json
import os
import sys
from typing import Any


def main() -> None:
    """Answer one job."""
    report = os.fdopen(os.dup(1), "w", encoding="utf-8")
    job = json.loads(sys.stdin.buffer.read())
    quiet = os.open(os.devnull, os.O_RDWR)
    os.dup2(quiet, 0)
    os.dup2(quiet, 1)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    nonce = job.pop("nonce")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(job["code"], "answer", "exec"), namespace)
    tests = [*(("call", call) for call in job["calls"]), *(("run", code) for code in job["statements"])]
    for number, (kind, test) in enumerate(tests):
        value = None
        try:
            if kind == "call":
                value = find(namespace, job["entry_point"])(*test["args"], **test["kwargs"])
            else:
                exec(compile(test, "test", "exec"), namespace)
            result = json.dumps({"value": value})
        except (Exception, SystemExit) as error:
            result = json.dumps({"error": f"{type(error).__name__}: {error}"[:200]})
        report.write(f"{nonce} {number} {result}\n")
        report.flush()


def find(namespace: dict[str, Any], entry_point: str) -> Any:
    """The function, or the method of a fresh instance for Class.method."""
    owner, _, method = entry_point.rpartition(".")
    return getattr(namespace[owner](), method) if owner else namespace[method]


if __name__ == "__main__":
    main()
