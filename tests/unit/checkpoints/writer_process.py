"""Run as a module by the crash tests: a writer that can be killed, or that has little room."""

import resource
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.errors import CheckpointError

from ...kit.checkpoint_samples import CURSOR, SECRET, make_batch, publish, write_batch, write_model


def write_large(folder: Path) -> None:
    """A checkpoint of 16 MB in five files."""
    write_model()(folder)
    for index in range(4):
        weights = np.full(1 << 20, index, np.float32)
        save_file({f"layer{index}": weights}, folder / f"model-{index}.safetensors")


def publish_forever(store: CheckpointStore) -> None:
    """Publish a policy and write a batch, again and again."""
    for version in range(1_000_000):
        store.mark_announced(publish(store, version, session="w", write=write_large))
        write_batch(store, make_batch(version + 1), CURSOR)


def write_with_little_room(store: CheckpointStore, limit_bytes: int) -> None:
    """Print the reason and the message of each refused write, when no file may exceed ``limit_bytes``."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    tensors = {"model.weight": torch.zeros(100_000)}
    actions: list[Callable[[], object]] = [
        lambda: publish(store, 0, write=write_large),
        lambda: write_batch(store, make_batch(1, [f"e0-{i}" for i in range(2000)]), CURSOR),
        lambda: store.save_state(session="abc", train_step=1, rollback_count=0, tensors=tensors, extra={}),
    ]
    for action in actions:
        try:
            action()
            print("no error")
        except CheckpointError as error:
            print(f"{error.reason}|{error}")


if __name__ == "__main__":
    opened = CheckpointStore(Path(sys.argv[1]), SECRET)
    if len(sys.argv) > 2:
        write_with_little_room(opened, int(sys.argv[2]))
    else:
        publish_forever(opened)
