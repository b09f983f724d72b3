"""A process that has the large imports behind it and forks others from itself. Usage: warm_template.py ROOT MODULE...

It imports the modules, then takes one JSON request a line: which module to run as ``__main__`` with which arguments,
environment and output file. It answers with the new process's id; the status is written to a file when that ends.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import psutil


def main(root: str, modules: list[str]) -> None:
    sys.path[0] = root
    # No garbage collection of imports, neither now nor at the end: in a forked process, it copies their memory.
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    atexit.register(gc.freeze)
    # Of a process with threads, a fork may keep a lock that no thread ever releases.
    threads = psutil.Process().num_threads()
    assert threads == 1, f"the imports of {modules} started {threads - 1} threads"
    for line in sys.stdin.buffer.raw:  # unbuffered: a process forked below must not hold requests of others
        request = json.loads(line)
        _reap()
        read, write = os.pipe()
        if os.fork() == 0:
            os.close(read)
            if _watched(request, write):
                return
            os._exit(0)
        os.close(write)
        with open(read, "rb") as answer:
            sys.stdout.buffer.write(answer.read())
        sys.stdout.buffer.flush()


def _watched(request: dict[str, Any], write: int) -> bool:
    """Fork the process itself, in which this returns True, and wait for its end, after which it returns False."""
    pid = os.fork()
    if pid == 0:
        os.close(write)
        _become(request)
        return True
    os.write(write, b"%d\n" % pid)
    # The ends of the template's pipes are its own: it may end before this process does.
    for descriptor in (write, 0, 1):
        os.close(descriptor)
    # The id stays taken until everybody can read how the process has ended.
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    unfinished = Path(request["status"] + ".tmp")
    with contextlib.suppress(FileNotFoundError):  # the template's folder has gone with the test session
        unfinished.write_text(str(status))
        unfinished.rename(request["status"])
    os.waitpid(pid, 0)
    return False


def _become(request: dict[str, Any]) -> None:
    """Take on what a process of its own would have been started with."""
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(output)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = [request["module"], *request["arguments"]]


def _reap() -> None:
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
    # Reached by the forked process, with its own arguments, and at the end of all requests.
    if sys.argv[0] != __file__:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
