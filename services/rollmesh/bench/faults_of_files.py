"""Faults of files at rest: a byte changes, or a folder is gone, and the trainer has to start from what is left."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollmesh.bench.attack import AttackedRun, Cost, Ending, Fault, one_of, send
from rollmesh.runtime.endpoints import read_endpoints

_STATES, _BATCHES, _POLICIES = "checkpoints/states", "checkpoints/batches", "checkpoints/policies"
_ENDS_WITH_ERROR = Ending(exit_statuses=(2, 1), green=False, says="trainer-0 cannot go on: CheckpointError: ")


@dataclass(frozen=True, slots=True)
class DamageLastStep(Fault):
    """One byte of the last step's batch file is flipped, and its trainer state is damaged or deleted.

    While the run ends: its launcher must find out. After the run has ended: a later audit must.
    """

    train_step: int
    after_the_end: bool = False
    cost: Cost = Cost.NOTHING

    @property
    def name(self) -> str:
        state, when = ("delete the newest state", "after the end") if self.after_the_end else ("flip COMMITTED", "last")
        return f"{state}, flip a byte of its batch file, {when}"

    @property
    def ending(self) -> Ending:
        return Ending(exit_statuses=(0, 1), green=False) if self.after_the_end else _ENDS_WITH_ERROR

    def inject(self, scene: AttackedRun) -> None:
        pattern = f"{_STATES}/{self.train_step:08d}-*/COMMITTED"
        while scene.waits() and (self.after_the_end or not any(scene.folder.glob(pattern))):
            time.sleep(0.001)
        for committed in scene.folder.glob(pattern):
            if self.after_the_end:
                shutil.rmtree(committed.parent)
            else:
                flip_byte(committed, scene.rng)
            flip_byte(scene.folder / _BATCHES / f"{self.train_step:08d}.pb", scene.rng)
            scene.struck_at.append(scene.train_step())


@dataclass(frozen=True, slots=True)
class DamageReplay(Fault):
    """One byte of a batch file that the newest trainer state does not cover is flipped, and the trainer is killed."""

    cost: Cost = Cost.NOTHING

    @property
    def name(self) -> str:
        return "flip a byte of a batch file, kill -9 trainer"

    @property
    def ending(self) -> Ending:
        return _ENDS_WITH_ERROR

    def inject(self, scene: AttackedRun) -> None:
        def uncovered() -> Path | None:
            files = sorted((scene.folder / _BATCHES).glob("[0-9]*.pb"))
            covered = max((int(c.parent.name.split("-")[0]) for c in _committed(scene)), default=0)
            return files[-1] if files and int(files[-1].stem) > covered else None

        _damage_and_kill(scene, uncovered)


@dataclass(frozen=True, slots=True)
class DamageState(Fault):
    """One byte of the newest trainer state is flipped, and the trainer is killed: it starts from an older state."""

    cost: Cost = Cost.NOTHING

    @property
    def name(self) -> str:
        return "flip a byte of the newest state, kill -9 trainer"

    def inject(self, scene: AttackedRun) -> None:
        def weights() -> Path | None:
            newest = max(_committed(scene), key=lambda committed: committed.parent.name, default=None)
            return None if newest is None else next(newest.parent.glob("*.safetensors"), None)

        _damage_and_kill(scene, weights)


@dataclass(frozen=True, slots=True)
class DamagePolicy(Fault):
    """One byte of the newest policy is flipped before a generator has read it, and the trainer is killed.

    Generators are stopped meanwhile: of tokens that they had sampled from it nothing could be vouched for any more.
    """

    cost: Cost = Cost.UNSAVED

    @property
    def name(self) -> str:
        return "flip a byte of the newest policy, kill -9 trainer"

    def inject(self, scene: AttackedRun) -> None:
        trainer = one_of(scene, "trainer")
        batches, announced = _seen(scene, f"{_BATCHES}/[0-9]*.pb"), f"{_POLICIES}/*/ANNOUNCED"
        while scene.waits() and _seen(scene, f"{_BATCHES}/[0-9]*.pb") == batches:
            time.sleep(0.001)
        generators = read_endpoints(scene.folder, "generator")
        try:
            for generator in generators:
                send(generator.pid, signal.SIGSTOP)
            scene.note_all_leased()
            before = _seen(scene, announced)
            while trainer is not None and scene.waits() and not (new := _seen(scene, announced) - before):
                time.sleep(0.001)
            if trainer is not None and scene.waits():
                send(trainer.pid, signal.SIGSTOP)
                flip_byte(max(new).parent / "model.safetensors", scene.rng)
                scene.strike(trainer.pid, signal.SIGKILL)
        finally:
            for generator in generators:
                send(generator.pid, signal.SIGCONT)


def flip_byte(file: Path, rng: random.Random) -> None:
    """Change one byte in the second quarter of a file: in a batch file, one of a trajectory."""
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content) // 4, len(content) // 2)] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def _damage_and_kill(scene: AttackedRun, target: Callable[[], Path | None]) -> None:
    """Flip a byte of a file, once there is one, while the trainer is stopped, and kill the trainer."""
    trainer = one_of(scene, "trainer")
    while trainer is not None and scene.waits():
        if target() is not None:
            send(trainer.pid, signal.SIGSTOP)
            if (file := target()) is not None:
                flip_byte(file, scene.rng)
                scene.strike(trainer.pid, signal.SIGKILL)
                return
            send(trainer.pid, signal.SIGCONT)
        time.sleep(0.005)


def _committed(scene: AttackedRun) -> set[Path]:
    return _seen(scene, f"{_STATES}/*/COMMITTED")


def _seen(scene: AttackedRun, pattern: str) -> set[Path]:
    return set(scene.folder.glob(pattern))
