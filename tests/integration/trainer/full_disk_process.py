"""One rank of a gang whose disk runs full at one place after another while it saves its state.

Usage, in the repository root: python -m tests.integration.trainer.full_disk_process MODEL_FOLDER ROOT_FOLDER
"""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import torch

from rollmesh.checkpoints import committed, durable, states
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.config.trainer import TrainerConfig
from rollmesh.errors import CheckpointError, Reason
from rollmesh.trainer.learner.distributed import join_world, leave_world
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.trainer.service.policy_catalog import PolicyCatalog
from rollmesh.trainer.service.ranks import RankCoordinator

SECRET = b"a secret of at least thirty-two b"
FULL_AT = ("rank-00001.json", "rank-00000.json", "COMMITTED")
"""Files that have no room: each save fails at one of them, and the one after it at the next."""


def main(model: Path, root: Path) -> None:
    torch.set_num_threads(1)
    world = join_world("cpu")
    checkpoints = CheckpointStore(root, SECRET)
    trainer = PolicyTrainer.from_folder(model, TrainerConfig(), world=world)
    ranks = RankCoordinator(trainer, world, checkpoints, PolicyCatalog(checkpoints))
    saves = 0

    def write_new_file(path: Path, data: bytes) -> None:
        nonlocal saves
        if path.name.startswith("rank-"):
            saves += 1
        if saves <= len(FULL_AT) and path.name == FULL_AT[saves - 1]:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        durable.write_new_file(path, data)

    states.write_new_file = committed.write_new_file = write_new_file
    if world.leads:
        for place in FULL_AT:
            try:
                ranks.save("s", 0, {})
            except CheckpointError as error:
                assert error.reason == Reason.DISK_FULL, error
                assert not list(root.glob("states/*")), place
                print("full", place)
        state = ranks.save("s", 0, {})
        ranks.load(state)
        print("saved", state.folder.name)
        ranks.dismiss()
    else:
        ranks.follow()
        print("followed to the end")
    leave_world()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
