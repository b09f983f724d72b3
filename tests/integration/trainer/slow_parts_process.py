"""Run as a script by the tests: the trainer service, whose parts take long. Usage: slow_parts_process.py RUN.yaml"""

from __future__ import annotations

import runpy
import time
from collections.abc import Sequence
from pathlib import Path

from rollmesh.trainer.service.ranks import RankCoordinator
from rollmesh.types import Group

PART_SECONDS = 3.0


def _slowly(self: RankCoordinator, groups: Sequence[Group]) -> None:
    time.sleep(PART_SECONDS)
    accumulate(self, groups)


if __name__ == "__main__":
    accumulate = RankCoordinator.accumulate
    RankCoordinator.accumulate = _slowly  # type: ignore[method-assign]
    runpy.run_path(str(Path(__file__).with_name("trainer_process.py")), run_name="__main__")
