"""Supervised fine-tuning from the first step, or the newest saved state, to the trained model.

The rows of a step, its learning rate and its dropout depend on the run file and the step alone. Weights and moments are
therefore the complete state: a run that was killed at any moment continues from its newest state to the same weights.
"""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.describe import read_json
from rollmesh.checkpoints.sealing import run_secret
from rollmesh.config.load import write_run_config
from rollmesh.config.recipes import resolve_model
from rollmesh.config.sft_config import SFT_FILE, SftConfig
from rollmesh.errors import CheckpointError, ConfigError, Reason, TrainingDiverged
from rollmesh.sft.sft_trainer import ProgressLine, SftStep, SftTrainer
from rollmesh.sft.trained_model import write_trained_model
from rollmesh.sft.training_rows import EpochOrder, SftRow, read_rows, rows_digest
from rollmesh.text import Tokenizer
from rollmesh.trainer.learner.distributed import (
    World,
    broadcast_bytes,
    join_world,
    leave_world,
    pick_device,
    sum_over_ranks,
)
from rollmesh.trainer.learner.policy_learner import PolicyLearner
from rollmesh.trainer.learner.policy_state import LearnerState
from rollmesh.trainer.service.run_log import METRICS_FILE, append_lines, keep_lines_up_to

_KEPT_STATES = 2


def fine_tune(config: SftConfig, stop: Callable[[], bool], stream: TextIO | None) -> Path | None:
    """Train to the last step and write the model; return its folder, or None after a ``stop``, whose work is saved.

    ``stop`` is asked before each step; progress goes to the ``stream``. Raises ConfigError, DataError, CheckpointError
    or TrainingDiverged.
    """
    world = join_world(pick_device(config.trainer.device).type)
    if config.launcher.torch_threads is not None:
        torch.set_num_threads(config.launcher.torch_threads)
    model = FineTuning(config, world, stop, ProgressLine(stream)).run()
    leave_world()
    return model


class FineTuning:
    """One run on this rank. Every rank reads the same rows and takes the same steps; rank 0 writes."""

    def __init__(self, config: SftConfig, world: World, stop: Callable[[], bool], progress: ProgressLine) -> None:
        folder = resolve_model(config.model.path)
        self._config = config
        self._world = world
        self._stop = stop
        self._progress = progress
        self._rows, self._held_out = _read_data(config, folder)
        section = config.trainer
        self._order = EpochOrder(len(self._rows), section.batch_rows, config.seed, config.data.shuffle)
        last = section.train_steps or (section.epochs or 1) * self._order.epoch_steps
        try:
            learner = PolicyLearner.load(
                folder,
                section,
                dtype=config.model.dtype,
                adapter=config.model.adapter,
                world=world,
                longest=max(len(row.token_ids) for row in (*self._rows, *self._held_out)),
            )
        except CheckpointError as error:
            raise ConfigError(f"model.path={config.model.path}: {error}") from error
        self._trainer = SftTrainer(learner, section, last, config.seed)
        self._state = LearnerState(learner.model, learner.optimizer)
        root = Path(config.folder)
        self._store = CheckpointStore(root / "checkpoints", run_secret(root))
        self._metrics = root / METRICS_FILE
        self._session = broadcast_bytes(secrets.token_hex(8).encode() if world.leads else None, world).decode()
        self._fixed = {
            "seed": config.seed,
            "model.path": config.model.path,
            "model.dtype": config.model.dtype,
            "data.shuffle": config.data.shuffle,
            "trainer.batch_rows": section.batch_rows,
            "trainer.optimizer": section.optimizer,
            "data.train": f"rows with the digest {rows_digest(self._rows)}",
        }
        """What a continued run must not change, by field."""
        self._skipped = 0
        """Updates in a row with a gradient that is not finite."""
        self._saved_step = 0
        self._evaluation_loss: float | None = None

    def run(self) -> Path | None:
        """Continue from the newest state; return the folder of the model, None after a stop."""
        trainer = self._trainer
        self._resume()
        if self._world.leads:
            write_run_config(self._config, Path(self._config.folder) / SFT_FILE)
            keep_lines_up_to(self._metrics, trainer.train_step or -1)
        if trainer.train_step == 0:
            self._record({"train_step": 0})
        while trainer.train_step < trainer.train_steps:
            if self._stopped():
                self._save()
                return None
            self._step()
        return write_trained_model(self._config, trainer.learner, trainer.train_step, self._evaluation_loss)

    def _step(self) -> None:
        trainer, section = self._trainer, self._config.trainer
        rows = [self._rows[number] for number in self._order.rows(trainer.train_step + 1)]
        done = trainer.train(rows)
        self._progress.step(done, trainer.train_steps)
        self._record({**asdict(done), "epoch": done.train_step / self._order.epoch_steps})
        self._check(done)
        if done.train_step % section.state_every_steps == 0 or done.train_step == trainer.train_steps:
            self._save()

    def _record(self, record: Mapping[str, Any]) -> None:
        """Append the line of a step, with the loss of the held-out rows when it is due."""
        step, section, last = record["train_step"], self._config.trainer, self._trainer.train_steps
        evaluation = {}
        if self._held_out and (step % section.evaluation_every_steps == 0 or step == last):
            begin = time.perf_counter()
            self._evaluation_loss = loss = self._trainer.evaluate(self._held_out)
            evaluation = {"loss": loss, "rows": len(self._held_out), "seconds": time.perf_counter() - begin}
            self._progress.note(f"step {step}/{last}  loss of {len(self._held_out)} held-out rows {loss:.4f}")
        if self._world.leads and (step or evaluation):
            append_lines(self._metrics, [{**record, "time": time.time(), "evaluation": evaluation or None}])

    def _check(self, done: SftStep) -> None:
        self._skipped = 0 if done.applied else self._skipped + 1
        limit = self._config.trainer.nonfinite_updates_limit
        if self._skipped >= limit:
            raise TrainingDiverged(
                f"train step {done.train_step}: the gradients of the last {self._skipped} updates are not finite "
                f"(trainer.nonfinite_updates_limit={limit}); lower trainer.learning_rate in a new folder"
            )

    def _stopped(self) -> bool:
        """Tell whether any rank was asked to stop."""
        return bool(sum_over_ranks(torch.tensor([float(self._stop())]), self._world))

    def _save(self) -> None:
        step = self._trainer.train_step
        if step == self._saved_step:
            return
        self._store.save_state(
            session=self._session,
            train_step=step,
            rollback_count=0,
            tensors=self._state.tensors(),
            extra=self._state.extra(step)
            | {"fixed": self._fixed, "skipped": self._skipped, "evaluation_loss": self._evaluation_loss},
        )
        self._saved_step = step
        if self._world.leads:
            self._store.prune_states(keep_last=_KEPT_STATES, session=self._session)

    def _resume(self) -> None:
        """Load the newest state that can be read, on all ranks together; without one the run begins at step 0.

        An older state loses no work: the steps after it are repeated.
        """
        for state in self._store.committed_states():
            extra: dict[str, Any] = dict(state.record.extra)
            self._refuse_changes(extra["fixed"], state.train_step)
            try:
                self._store.load_state(state, self._state.tensors_to_fill(extra))
            except CheckpointError as error:
                if error.reason == Reason.FOREIGN_ARCHITECTURE:
                    raise ConfigError(
                        f"model.path={self._config.model.path}: it is not the model whose training this folder has "
                        f"({error}); name another folder"
                    ) from error
                if error.outside:
                    raise
                self._progress.note(f"{error}; continuing from an older state")
                continue
            self._trainer.train_step = self._saved_step = state.train_step
            self._skipped, self._evaluation_loss = int(extra["skipped"]), extra["evaluation_loss"]
            self._progress.note(f"continuing after train step {state.train_step} of {self._trainer.train_steps}")
            return

    def _refuse_changes(self, before: Any, done: int) -> None:
        for field, now in self._fixed.items():
            if before[field] != now:
                raise ConfigError(
                    f"{field}={now}: the training in {self._config.folder} began with {before[field]}; set it as it "
                    "was, or name another folder"
                )
        if done > (last := self._trainer.train_steps):
            raise ConfigError(
                f"trainer.epochs, trainer.train_steps: they make {last} train steps, and the training in "
                f"{self._config.folder} has done {done}; set more of them, or name another folder"
            )


def _read_data(config: SftConfig, folder: Path) -> tuple[Sequence[SftRow], Sequence[SftRow]]:
    """Read the rows for training and those held out. Raises DataError or ConfigError."""
    positions = read_json(folder / "config.json").get("max_position_embeddings")
    limit = positions if isinstance(positions, int) else 2**31 - 1
    longest = config.data.max_tokens or limit
    if longest > limit:
        raise ConfigError(f"data.max_tokens={longest} is more than the model's max_position_embeddings={limit}")
    tokenizer = Tokenizer(folder)
    train, held_out = (
        read_rows(files, tokenizer, config.data, longest) if files else ()
        for files in (config.data.train, config.data.evaluation)
    )
    return train, held_out
