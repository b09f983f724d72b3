"""Running a module as the two ranks of a gang, without torchrun's own processes."""

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from torch.distributed import TCPStore

from ...kit.warm import TRAINER, WarmProcess, template

WORLD = 2


class TwoRanks:
    """Two processes of ``tests/integration/trainer/<script>.py``, or of a module, and the store at which they meet."""

    def __init__(
        self,
        script: str,
        *arguments: str | Path,
        output: Callable[[int], Path],
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        module = script if "." in script else f"tests.integration.trainer.{script}"
        # As with torchrun, the store is there before the ranks: a port that was only looked up may be taken.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common = {
            **os.environ,
            **environment,
            "WORLD_SIZE": str(WORLD),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        self._ranks = [
            # Each with its own order of sets, as separate processes have.
            template(*TRAINER, seed=rank).start(
                module,
                [str(a) for a in arguments],
                output=output(rank),
                environment={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(WORLD)
        ]

    @property
    def returncode(self) -> int | None:
        """A status that is not 0 as soon as a rank has ended with it; 0 once both have ended."""
        codes = [rank.poll() for rank in self._ranks]
        return next((code for code in codes if code), None if None in codes else 0)

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        return next((code for code in self.statuses(timeout) if code), 0)

    @property
    def leader(self) -> WarmProcess:
        return self._ranks[0]

    def statuses(self, timeout: float = 60.0) -> list[int]:
        """The exit statuses of the ranks, once both have ended."""
        return [rank.wait(timeout) for rank in self._ranks]

    def kill(self) -> None:
        for rank in self._ranks:
            rank.kill()


def run_two_ranks(scene: str, *arguments: str | Path) -> list[str]:
    """Run a scene of ``rank_process`` as every rank; returns what each printed, in rank order."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"rank-{rank}" for rank in range(WORLD)]
        ranks = TwoRanks("rank_process", scene, *arguments, output=lambda rank: outputs[rank])
        try:
            code = ranks.wait(120)
        finally:
            ranks.kill()
            printed = [output.read_text() for output in outputs]
    assert code == 0, "\n".join(printed)
    return printed
