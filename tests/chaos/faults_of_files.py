"""Faults of stored files: a byte changes, or a folder is missing, and the trainer restarts from the other files."""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from rollmesh.runtime.endpoints import read_endpoints

from .attack import AttackedRun, random_process, send
from .faults_of_services import kill_service
from .short_run import finished_train_steps

_STATES, _BATCHES, _POLICIES = "checkpoints/states", "checkpoints/batches", "checkpoints/policies"


def damage_last_step(attacked: AttackedRun, train_step: int, *, after_the_end: bool = False) -> None:
    """Damage the last step's batch file (one byte), and damage its trainer state, or delete it after the end.

    While the run ends, its launcher must detect the damage. After the end of the run, a later audit must.
    """
    pattern = f"{_STATES}/{train_step:08d}-*/COMMITTED"
    attacked.wait_for(lambda: not after_the_end and any(attacked.folder.glob(pattern)))
    for committed in attacked.folder.glob(pattern):
        if after_the_end:
            shutil.rmtree(committed.parent)
        else:
            flip_byte(committed, attacked.rng)
        flip_byte(attacked.folder / _BATCHES / f"{train_step:08d}.pb", attacked.rng)
        attacked.struck_at.append(finished_train_steps(attacked.folder))


def damage_replay(attacked: AttackedRun) -> None:
    """Damage a batch file newer than the newest trainer state (one byte), and kill the trainer."""

    def uncovered() -> Path | None:
        files = sorted((attacked.folder / _BATCHES).glob("[0-9]*.pb"))
        covered = max((int(c.parent.name.split("-")[0]) for c in _committed(attacked)), default=0)
        return files[-1] if files and int(files[-1].stem) > covered else None

    _damage_and_kill(attacked, uncovered)


def damage_state(attacked: AttackedRun) -> None:
    """Damage the newest trainer state (one byte) and kill the trainer, so that an older state is used."""

    def weights() -> Path | None:
        newest = max(_committed(attacked), key=lambda committed: committed.parent.name, default=None)
        return None if newest is None else next(newest.parent.glob("*.safetensors"), None)

    _damage_and_kill(attacked, weights)


def damage_policy(attacked: AttackedRun) -> None:
    """Damage the newest policy (one byte) before a generator reads it, and kill the trainer.

    The generators are stopped during the damage: tokens that they sampled from a damaged policy could not be verified.
    """
    trainer = random_process(attacked, "trainer")
    batches, announced = _paths(attacked, f"{_BATCHES}/[0-9]*.pb"), f"{_POLICIES}/*/ANNOUNCED"
    attacked.wait_for(lambda: _paths(attacked, f"{_BATCHES}/[0-9]*.pb") != batches)
    generators = read_endpoints(attacked.folder, "generator")
    try:
        for generator in generators:
            send(generator.pid, signal.SIGSTOP)
        attacked.note_all_leased()
        before = _paths(attacked, announced)
        new = attacked.wait_for(lambda: _paths(attacked, announced) - before)
        if trainer is not None and new:
            send(trainer.pid, signal.SIGSTOP)
            flip_byte(max(new).parent / "model.safetensors", attacked.rng)
            attacked.strike(trainer.pid, signal.SIGKILL)
    finally:
        for generator in generators:
            send(generator.pid, signal.SIGCONT)


def lose_policies(attacked: AttackedRun) -> None:
    """Kill a generator and delete the node's announced policies; wait until one is pulled from the bucket again.

    The trainer is stopped meanwhile: generators would load the newer policies that it publishes on this node.
    """
    trainer = random_process(attacked, "trainer")
    kill_service(attacked, "generator")
    if trainer is None:
        return
    send(trainer.pid, signal.SIGSTOP)
    try:
        folders = [marker.parent for marker in _paths(attacked, f"{_POLICIES}/*/ANNOUNCED")]
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)  # the mesh may delete the same folder
        if not attacked.wait_for(lambda: any((folder / "manifest.json").exists() for folder in folders), 0.02):
            attacked.struck_at.clear()  # the round fails: nothing was pulled
    finally:
        send(trainer.pid, signal.SIGCONT)


def flip_byte(file: Path, rng: random.Random) -> None:
    """Flip one bit of a byte in the second quarter of a file; in a batch file, that byte belongs to a trajectory."""
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content) // 4, len(content) // 2)] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def _damage_and_kill(attacked: AttackedRun, target: Callable[[], Path | None]) -> None:
    """Wait for the target file, flip one of its bytes while the trainer is stopped, and kill the trainer."""
    trainer = random_process(attacked, "trainer")
    while trainer is not None and attacked.wait_for(lambda: target() is not None, 0.005):
        send(trainer.pid, signal.SIGSTOP)
        if (file := target()) is not None:
            flip_byte(file, attacked.rng)
            attacked.strike(trainer.pid, signal.SIGKILL)
            return
        send(trainer.pid, signal.SIGCONT)


def _committed(attacked: AttackedRun) -> set[Path]:
    return _paths(attacked, f"{_STATES}/*/COMMITTED")


def _paths(attacked: AttackedRun, pattern: str) -> set[Path]:
    return set(attacked.folder.glob(pattern))
