"""Entry point of the ``rollmesh`` command and of ``python -m rollmesh``.

The imports take a second or more. Ctrl-C during them ends the process at once, without a traceback.
"""

import os
import signal


def main() -> None:
    """Import and run the command line."""
    # Threads of torch that spin while they wait for each other slow an audit on a busy machine several times.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # gRPC's own hooks start threads in every fork, and at times crash it; no fork of this project uses gRPC.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from rollmesh.cli.main import main as run_command

    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run_command()


if __name__ == "__main__":
    main()
