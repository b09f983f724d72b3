"""torchrun for the ranks of a trainer, with an exit status that says whether starting them again is of use.

``python -m rollmesh.trainer.torchrun`` takes the flags and ``PET_*`` variables of torchrun, which itself ends with 1
whatever its ranks ended with; what starts a gang (a Job, ``rollmesh up``) would try a wrong setting again and again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from rollmesh.runtime.lifecycle import EXIT_CONFIG


def main(arguments: Sequence[str] | None = None) -> None:
    """Run torchrun; SystemExit with ``EXIT_CONFIG`` when a rank of this node ended with that."""
    try:
        run.main(arguments)
    except ChildFailedError as error:
        # Any rank, not the first one: the others fail with their connection to the rank that was refused, and which
        # of them torchrun saw first is chance.
        if any(failure.exitcode == EXIT_CONFIG for failure in error.failures.values()):
            print(error, file=sys.stderr)
            raise SystemExit(EXIT_CONFIG) from error
        raise


if __name__ == "__main__":
    main()
