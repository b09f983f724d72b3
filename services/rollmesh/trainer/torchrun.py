"""torchrun for the ranks of a trainer, with an exit status that tells whether a restart can help.

``python -m rollmesh.trainer.torchrun`` takes the flags and ``PET_*`` variables of torchrun. torchrun itself exits with
1 for every status of its ranks, so the supervisor of the ranks (a Job, ``rollmesh up``) would restart them repeatedly
with a wrong setting. After a signal it exits with 1 and a traceback.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torch.distributed import DistError, run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError

from rollmesh.runtime.lifecycle import EXIT_CONFIG, EXIT_UNFINISHED, die_with_parent
from rollmesh.trainer.pods import WAIT_SECONDS, is_first, say, use_pods, wait_for_first


def main(arguments: Sequence[str] | None = None) -> None:
    """Run torchrun. Exits with ``EXIT_CONFIG`` or ``EXIT_UNFINISHED`` if a rank of this node exited with it.

    After a signal it exits with 128 plus the signal's number, once its ranks have ended. It ends with its ranks when
    the launcher dies that their argument ``--supervised-by`` names.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--supervised-by", type=int)
    launcher = parser.parse_known_args(arguments)[0].supervised_by
    if launcher is not None:
        die_with_parent(launcher)
    try:
        _run(run.parse_args(arguments))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        # Check every rank: the others fail when the rejected rank closes its connection, and torchrun may report any
        # of them first.
        statuses = {failure.exitcode for failure in error.failures.values()}
        for status in (EXIT_CONFIG, EXIT_UNFINISHED):
            if status in statuses:
                print(error, file=sys.stderr)
                raise SystemExit(status) from error
        raise
    except SignalException as error:
        print(f"torchrun: stopped by {error.sigval.name}", file=sys.stderr)
        raise SystemExit(128 + error.sigval) from error


def _run(arguments: argparse.Namespace) -> None:
    """Run the ranks of this node, again each time that the first pod, at which the pods meet, is replaced."""
    several = use_pods(arguments)
    while True:
        if several:
            wait_for_first(arguments)
        try:
            run.run(arguments)  # type: ignore[no-untyped-call]
            return
        except (RendezvousConnectionError, DistError):
            if not several or is_first(arguments):
                raise
            say(f"the connection to pod {arguments.rdzv_endpoint}, at which all pods meet, is lost")
        except RendezvousTimeoutError:
            say(f"not all of {arguments.nnodes} pods came within {WAIT_SECONDS:.0f} s")
            raise SystemExit(1) from None


if __name__ == "__main__":
    main()
