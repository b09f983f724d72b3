"""torchrun for the ranks of a trainer, with an exit status that tells whether a restart can help.

``python -m rollmesh.trainer.torchrun`` takes the flags and ``PET_*`` variables of torchrun. torchrun itself exits with
1 for every status of its ranks, so the supervisor of the ranks (a Job, ``rollmesh up``) would restart them repeatedly
with a wrong setting. After a signal it exits with 1 and a traceback.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from rollmesh.runtime.lifecycle import EXIT_CONFIG, EXIT_UNFINISHED, die_with_parent


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
        run.main(arguments)
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


if __name__ == "__main__":
    main()
