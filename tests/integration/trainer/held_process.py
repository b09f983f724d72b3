"""Run as a script by the tests: the trainer service, which stops or fails at one point of one step.

HELD_AT names the point and HELD_STEP the train step. The trainer stops there until the pipe ``release`` in the run
folder is opened for writing, and not again; with HELD_FAILS it raises an error. With NEXT_STEP_FAILS the train step
after it raises an error that is no RollmeshError. Usage: held_process.py RUN.yaml
"""

from __future__ import annotations

import asyncio
import os
import runpy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rollmesh.checkpoints import policies
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.manifest import MANIFEST_FILE
from rollmesh.errors import CheckpointError
from rollmesh.trainer.service import publishing
from rollmesh.trainer.service.batch_source import BatchSource
from rollmesh.trainer.service.publishing import Announcer, Publisher
from rollmesh.trainer.service.ranks import RankCoordinator
from rollmesh.types import Batch

_FOLDER = Path(sys.argv[1]).parent


def _step_of(path: Path) -> int:
    return int(path.parent.name.partition("-")[0]) if path.name == MANIFEST_FILE else -1


def _step_of_rollback(saved: Mapping[str, Any]) -> int:
    return saved["train_step"] if saved["rollback_count"] else -1


POINTS: dict[str, tuple[Any, str, Callable[..., int]]] = {
    "before the canary": (Publisher, "_scored_canary", lambda _, train_step, __: train_step),
    "before the folder": (CheckpointStore, "publish", lambda *_, train_step, **__: train_step),
    "before the manifest": (policies, "write_new_file", lambda path, _: _step_of(path)),
    "before the announcement": (Announcer, "announce", lambda _, record: record.train_step),
    "before the marker": (CheckpointStore, "mark_announced", lambda _, record: record.train_step),
    "before the pruning": (CheckpointStore, "prune", lambda _, records, **__: max(r.train_step for r in records)),
    "before the state of a rollback": (CheckpointStore, "save_state", lambda _, **saved: _step_of_rollback(saved)),
    "before the confirmation": (BatchSource, "_confirm", lambda _, claimed: claimed.batch.train_step - 1),
}
"""Function before which the trainer stops, and the step of a call: the one whose publication is in flight."""


def _stop() -> None:
    if "HELD_FAILS" in os.environ:
        raise CheckpointError("the test lets this fail")
    if (_FOLDER / "held").exists():
        return
    (_FOLDER / "held").touch()
    (_FOLDER / "release").read_bytes()


def _fail_in_step(step: int) -> None:
    original = RankCoordinator.train

    def train(self: RankCoordinator, batch: Batch, *args: Any) -> Any:
        if batch.train_step == step:
            raise RuntimeError("the test lets this step fail")
        return original(self, batch, *args)

    RankCoordinator.train = train  # type: ignore[method-assign]


def _hold(owner: Any, name: str, step_of: Callable[..., int], step: int) -> None:
    original = getattr(owner, name)

    async def stop_then_await(*args: Any, **kwargs: Any) -> Any:
        if step_of(*args, **kwargs) == step:
            await asyncio.to_thread(_stop)
        return await original(*args, **kwargs)

    def stop_then_call(*args: Any, **kwargs: Any) -> Any:
        if step_of(*args, **kwargs) == step:
            _stop()
        return original(*args, **kwargs)

    setattr(owner, name, stop_then_await if asyncio.iscoroutinefunction(original) else stop_then_call)


if __name__ == "__main__":
    publishing._IDLE_SECONDS = 0.05
    _hold(*POINTS[os.environ["HELD_AT"]], int(os.environ["HELD_STEP"]))
    if "NEXT_STEP_FAILS" in os.environ:
        _fail_in_step(int(os.environ["HELD_STEP"]) + 1)
    runpy.run_path(str(Path(__file__).with_name("trainer_process.py")), run_name="__main__")
