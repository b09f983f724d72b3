"""Faults of stored files: a byte changes, or a folder is missing, and the trainer restarts from the other files."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollmesh.bench.attack import AttackedRun, Cost, ExpectedEnd, Fault, random_process, send
from rollmesh.runtime.endpoints import read_endpoints

_STATES, _BATCHES, _POLICIES = "checkpoints/states", "checkpoints/batches", "checkpoints/policies"
_ENDS_WITH_ERROR = ExpectedEnd(
    exit_statuses=(2, 1), green=False, output_contains="trainer-0 cannot continue: CheckpointError: "
)


@dataclass(frozen=True, slots=True)
class DamageLastStep(Fault):
    """Fault that damages the last step's batch file (one byte), and damages or deletes its trainer state.

    While the run ends, its launcher must detect the damage. After the end of the run, a later audit must.
    """

    train_step: int
    after_the_end: bool = False
    cost: Cost = Cost.NOTHING

    @property
    def name(self) -> str:
        state, when = ("delete the newest state", "after the end") if self.after_the_end else ("flip COMMITTED", "last")
        return f"{state}, flip a byte of its batch file, {when}"

    @property
    def expected_end(self) -> ExpectedEnd:
        return ExpectedEnd(exit_statuses=(0, 1), green=False) if self.after_the_end else _ENDS_WITH_ERROR

    def inject(self, attacked: AttackedRun) -> None:
        pattern = f"{_STATES}/{self.train_step:08d}-*/COMMITTED"
        while attacked.may_strike() and (self.after_the_end or not any(attacked.folder.glob(pattern))):
            time.sleep(0.001)
        for committed in attacked.folder.glob(pattern):
            if self.after_the_end:
                shutil.rmtree(committed.parent)
            else:
                flip_byte(committed, attacked.rng)
            flip_byte(attacked.folder / _BATCHES / f"{self.train_step:08d}.pb", attacked.rng)
            attacked.struck_at.append(attacked.train_step())


@dataclass(frozen=True, slots=True)
class DamageReplay(Fault):
    """Fault that damages a batch file newer than the newest trainer state (one byte), and kills the trainer."""

    cost: Cost = Cost.NOTHING

    @property
    def name(self) -> str:
        return "flip a byte of a batch file, kill -9 trainer"

    @property
    def expected_end(self) -> ExpectedEnd:
        return _ENDS_WITH_ERROR

    def inject(self, attacked: AttackedRun) -> None:
        def uncovered() -> Path | None:
            files = sorted((attacked.folder / _BATCHES).glob("[0-9]*.pb"))
            covered = max((int(c.parent.name.split("-")[0]) for c in _committed(attacked)), default=0)
            return files[-1] if files and int(files[-1].stem) > covered else None

        _damage_and_kill(attacked, uncovered)


@dataclass(frozen=True, slots=True)
class DamageState(Fault):
    """Fault that damages the newest trainer state (one byte) and kills the trainer, so that an older state is used."""

    cost: Cost = Cost.NOTHING

    @property
    def name(self) -> str:
        return "flip a byte of the newest state, kill -9 trainer"

    def inject(self, attacked: AttackedRun) -> None:
        def weights() -> Path | None:
            newest = max(_committed(attacked), key=lambda committed: committed.parent.name, default=None)
            return None if newest is None else next(newest.parent.glob("*.safetensors"), None)

        _damage_and_kill(attacked, weights)


@dataclass(frozen=True, slots=True)
class DamagePolicy(Fault):
    """Fault that damages the newest policy (one byte) before a generator reads it, and kills the trainer.

    The generators are stopped during the damage: tokens that they sampled from a damaged policy could not be verified.
    """

    cost: Cost = Cost.UNSAVED

    @property
    def name(self) -> str:
        return "flip a byte of the newest policy, kill -9 trainer"

    def inject(self, attacked: AttackedRun) -> None:
        trainer = random_process(attacked, "trainer")
        batches, announced = _paths(attacked, f"{_BATCHES}/[0-9]*.pb"), f"{_POLICIES}/*/ANNOUNCED"
        while attacked.may_strike() and _paths(attacked, f"{_BATCHES}/[0-9]*.pb") == batches:
            time.sleep(0.001)
        generators = read_endpoints(attacked.folder, "generator")
        try:
            for generator in generators:
                send(generator.pid, signal.SIGSTOP)
            attacked.note_all_leased()
            before = _paths(attacked, announced)
            while trainer is not None and attacked.may_strike() and not (new := _paths(attacked, announced) - before):
                time.sleep(0.001)
            if trainer is not None and attacked.may_strike():
                send(trainer.pid, signal.SIGSTOP)
                flip_byte(max(new).parent / "model.safetensors", attacked.rng)
                attacked.strike(trainer.pid, signal.SIGKILL)
        finally:
            for generator in generators:
                send(generator.pid, signal.SIGCONT)


def flip_byte(file: Path, rng: random.Random) -> None:
    """Flip one bit of a byte in the second quarter of a file; in a batch file, that byte belongs to a trajectory."""
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content) // 4, len(content) // 2)] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def _damage_and_kill(attacked: AttackedRun, target: Callable[[], Path | None]) -> None:
    """Wait for the target file, flip one of its bytes while the trainer is stopped, and kill the trainer."""
    trainer = random_process(attacked, "trainer")
    while trainer is not None and attacked.may_strike():
        if target() is not None:
            send(trainer.pid, signal.SIGSTOP)
            if (file := target()) is not None:
                flip_byte(file, attacked.rng)
                attacked.strike(trainer.pid, signal.SIGKILL)
                return
            send(trainer.pid, signal.SIGCONT)
        time.sleep(0.005)


def _committed(attacked: AttackedRun) -> set[Path]:
    return _paths(attacked, f"{_STATES}/*/COMMITTED")


def _paths(attacked: AttackedRun, pattern: str) -> set[Path]:
    return set(attacked.folder.glob(pattern))
