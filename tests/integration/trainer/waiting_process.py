"""One of two ranks: rank 0 sends an order late, then ends without leaving the group. Rank 1 prints how its waits end.

Usage, in the repository root: python -m tests.integration.trainer.waiting_process FOLDER
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from rollmesh.trainer.learner.distributed import World, broadcast_bytes, join_world, leave_world, sum_over_ranks


def lead(world: World, folder: Path) -> None:
    (folder / "waited").read_bytes()
    broadcast_bytes(b"late", world)
    os._exit(0)  # as after a kill: the kernel closes the connections


def follow(world: World, folder: Path) -> None:
    # The collective calls of training keep their limit, which is made short here.
    _set_pg_timeout(timedelta(seconds=1), dist.group.WORLD)
    with ThreadPoolExecutor(1) as pool:
        order = pool.submit(broadcast_bytes, None, world)
        try:
            sum_over_ranks(torch.zeros(1), world)
        except RuntimeError as error:
            print("training:", error)
        (folder / "waited").write_bytes(b"")
        print("order:", order.result().decode())
    try:
        broadcast_bytes(None, world)
    except RuntimeError as error:
        print("leader:", error)


if __name__ == "__main__":
    world = join_world("cpu")
    (lead if world.leads else follow)(world, Path(sys.argv[1]))
    leave_world()
