"""Script that runs a program and kills the program with all its children when the generator dies.

Usage: ``python -I -S orphan_guard.py COMMAND...`` (standard library only, no package import) in a new session, with a
pipe as standard input. The generator holds the other end of the pipe. When the generator dies for any reason, the pipe
closes and the guard kills the whole session. SIGTERM is forwarded only to the program, which then ends its children.
The exit status is the program's status, or 128 plus the signal that ended it.
"""

import os
import signal
import subprocess
import sys
import threading

_PR_SET_PDEATHSIG = 1


def _prepare_child() -> None:
    """Restore default signals between fork and exec, and die with the guard (Linux); the process has one thread."""
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
    """Run ``command`` until it exits; return its status."""
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
