"""Run as a script by the tests: the trainer service. Usage: trainer_process.py RUN.yaml

FAULT names a fault of this trainer: ``held`` (at the point HELD_AT of the step HELD_STEP it waits until the pipe
``release`` in the run folder is opened for writing, and not again; with HELD_FAILS it raises an error; with
NEXT_STEP_FAILS the step after it raises an error that is no RollmeshError), ``unreachable`` (each method of the
checkpoint store that the start and the training loop use fails once), ``full marker`` (the disk is full at the first
mark of each announced policy) or ``slow parts``.
"""

import asyncio
import errno
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from rollmesh.checkpoints import durable, policies
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.manifest import MANIFEST_FILE
from rollmesh.config import load_run_config
from rollmesh.errors import CheckpointError, Reason
from rollmesh.runtime.lifecycle import Shutdown, run_service
from rollmesh.runtime.logging import configure_logging
from rollmesh.trainer.main import serve
from rollmesh.trainer.service import publishing
from rollmesh.trainer.service.batch_source import BatchSource
from rollmesh.trainer.service.publishing import Publisher
from rollmesh.trainer.service.ranks import RankCoordinator
from rollmesh.trainer.service.training_loop import TrainingLoop

PART_SECONDS = 3.0


def _step_of(path: Path) -> int:
    return int(path.parent.name.partition("-")[0]) if path.name == MANIFEST_FILE else -1


def _step_of_rollback(saved: Mapping[str, Any]) -> int:
    return saved["train_step"] if saved["rollback_count"] else -1


POINTS: dict[str, tuple[Any, str, Callable[..., int]]] = {
    "before the canary": (Publisher, "_scored_canary", lambda _, train_step, __: train_step),
    "before the folder": (CheckpointStore, "publish", lambda *_, train_step, **__: train_step),
    "before the manifest": (policies, "write_new_file", lambda path, _: _step_of(path)),
    "before the announcement": (Publisher, "_announce", lambda _, record: record.train_step),
    "before the marker": (CheckpointStore, "mark_announced", lambda _, record: record.train_step),
    "before the pruning": (CheckpointStore, "prune", lambda _, records, **__: max(r.train_step for r in records)),
    "before the state of a rollback": (CheckpointStore, "save_state", lambda _, **saved: _step_of_rollback(saved)),
    "before the confirmation": (BatchSource, "_confirm", lambda _, claimed: claimed.batch.train_step - 1),
}
"""Function before which the trainer stops, and the step of a call: the one whose publication is in flight."""


def before(owner: Any, name: str, act: Callable[..., None]) -> None:
    """Let a function of ``owner`` call ``act`` with its arguments first, in another thread if it is a coroutine's."""
    original = getattr(owner, name)

    async def act_then_await(*args: Any, **kwargs: Any) -> Any:
        await asyncio.to_thread(act, *args, **kwargs)
        return await original(*args, **kwargs)

    def act_then_call(*args: Any, **kwargs: Any) -> Any:
        act(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, act_then_await if asyncio.iscoroutinefunction(original) else act_then_call)


def held() -> None:
    owner, name, step_of = POINTS[os.environ["HELD_AT"]]
    step, folder = int(os.environ["HELD_STEP"]), Path(sys.argv[1]).parent
    publishing._IDLE_SECONDS = 0.05

    def stop(*args: Any, **kwargs: Any) -> None:
        if step_of(*args, **kwargs) != step:
            return
        if os.environ.get("HELD_FAILS"):
            raise CheckpointError("the test lets this fail")
        if not (folder / "held").exists():
            (folder / "held").touch()
            (folder / "release").read_bytes()

    def fail(_: RankCoordinator, batch: Any, *__: Any) -> None:
        if "NEXT_STEP_FAILS" in os.environ and batch.train_step == step + 1:
            raise RuntimeError("the test lets this step fail")

    before(owner, name, stop)
    before(RankCoordinator, "train", fail)


def unreachable() -> None:
    def fail_once(name: str) -> None:
        used: set[str] = set()

        def fail(*_: Any, **__: Any) -> None:
            if name not in used:
                used.add(name)
                raise CheckpointError(f"{name}: the store is unreachable", reason=Reason.UNREACHABLE)

        before(CheckpointStore, name, fail)

    def fail_in_the_loop(_: TrainingLoop) -> None:
        for name in (
            "complete_policies",
            "stored_batch",
            "write_batch",
            "prune",
            "prune_states",
            "batch_steps",
            "open",
        ):
            fail_once(name)

    before(TrainingLoop, "run", fail_in_the_loop)
    for name in ("lineage", "remove_unfinished_batches", "load_state"):
        fail_once(name)


def full_marker() -> None:
    full: set[Path] = set()

    def write_new_file(path: Path, data: bytes) -> None:
        if path.name == policies.ANNOUNCED_FILE and path not in full:
            full.add(path)
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        durable.write_new_file(path, data)

    policies.write_new_file = write_new_file


def slow_parts() -> None:
    before(RankCoordinator, "accumulate", lambda *_: time.sleep(PART_SECONDS))


FAULTS = {"held": held, "unreachable": unreachable, "full marker": full_marker, "slow parts": slow_parts}

if __name__ == "__main__":
    torch.set_num_threads(1)
    if fault := os.environ.get("FAULT"):
        FAULTS[fault]()
    config = load_run_config(sys.argv[1])
    configure_logging(config.telemetry, service="trainer-0", run=config.name)

    async def main(shutdown: Shutdown) -> None:
        await serve(config, 0, shutdown)

    sys.exit(run_service(main))
