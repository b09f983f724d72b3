"""Running a module as the two ranks of a gang, without torchrun's own processes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from torch.distributed import TCPStore

from ..warm import TRAINER, template

WORLD = 2


def run_two_ranks(script: str, *arguments: str | Path) -> list[str]:
    """Run ``tests/integration/trainer/<script>.py`` as every rank; returns what each printed, in rank order."""
    # As with torchrun, the ranks meet at a store that is there already: a port that was only looked up may be taken.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        **os.environ,
        "WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"rank-{rank}" for rank in range(WORLD)]
        ranks = [
            # Each with its own order of sets, as separate processes have.
            template(*TRAINER, seed=rank).start(
                f"tests.integration.trainer.{script}",
                [str(a) for a in arguments],
                output=outputs[rank],
                environment={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(WORLD)
        ]
        try:
            codes = [rank.wait(120) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
            printed = [output.read_text() for output in outputs]
    assert codes == [0] * WORLD, "\n".join(printed)
    return printed
