"""Runs a program and ends it, with all that it started, when the process that asked for it is gone.

Started as a script of its own (standard library only, no package import): ``python -I -S keeper.py COMMAND...`` with
a pipe as standard input, in a session of its own. The other end of the pipe is held by the generator; when that dies,
however it dies, the pipe ends and the whole session is killed. SIGTERM is passed on to the program alone, which then
ends its own children. Exits with the program's status, or 128 plus the signal that ended it.
"""

import os
import signal
import subprocess
import sys
import threading

_PR_SET_PDEATHSIG = 1


def _prepare_child() -> None:
    """Between fork and exec, in a process with one thread: default signals, and death with the keeper (Linux)."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _kill_session_when_orphaned() -> None:
    while os.read(0, 1024):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main(command: list[str]) -> int:
    """Run ``command`` to its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_prepare_child)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error}", file=sys.stderr, flush=True)
        return 127
    signal.signal(signal.SIGTERM, lambda *_: child.send_signal(signal.SIGTERM))
    threading.Thread(target=_kill_session_when_orphaned, daemon=True).start()
    status = child.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
