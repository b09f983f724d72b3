"""Run as a script by the tests: the trainer service, whose checkpoint store is unreachable at the first use of methods.

The methods are those that the training loop uses, and those of the start; each fails once. Usage:
unreachable_process.py RUN.yaml
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.errors import CheckpointError, Reason
from rollmesh.trainer.service.training_loop import TrainingLoop

METHODS = ("complete_policies", "stored_batch", "write_batch", "prune", "prune_states", "batch_steps", "open")


_used: set[str] = set()


def _fail_once(name: str) -> None:
    original = getattr(CheckpointStore, name)

    def fail_then_call(*args: Any, **kwargs: Any) -> Any:
        if name not in _used:
            _used.add(name)
            raise CheckpointError(f"{name}: the store is unreachable", reason=Reason.UNREACHABLE)
        return original(*args, **kwargs)

    setattr(CheckpointStore, name, fail_then_call)


async def _run(self: TrainingLoop) -> None:
    for name in METHODS:
        _fail_once(name)
    await run(self)


if __name__ == "__main__":
    for method in ("lineage", "remove_unfinished_batches", "load_state"):
        _fail_once(method)
    run = TrainingLoop.run
    TrainingLoop.run = _run  # type: ignore[method-assign]
    runpy.run_path(str(Path(__file__).with_name("trainer_process.py")), run_name="__main__")
