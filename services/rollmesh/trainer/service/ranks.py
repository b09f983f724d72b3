"""All ranks of the trainer in step: rank 0 gives orders, the others carry out the same calls in the same order.

An order is one JSON message, broadcast as bytes (never pickle); a batch follows as protobuf frames. A rank that fails
leaves with an error, its peers fail in their next collective call, and the launcher starts the whole gang again.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from rollmesh.checkpoints.batch_frames import batch_from_bytes, batch_to_bytes
from rollmesh.checkpoints.batches import StepSettings
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.committed import CommittedState
from rollmesh.checkpoints.manifest import CanarySequence
from rollmesh.checkpoints.reasons import Reason
from rollmesh.checkpoints.states import load_weights
from rollmesh.errors import CheckpointError, TrainingDiverged
from rollmesh.runtime.logging import get_logger
from rollmesh.trainer.learner.distributed import World, broadcast_bytes
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.trainer.learner.step_report import StepReport
from rollmesh.trainer.service.policy_catalog import PolicyCatalog
from rollmesh.types import Batch, Group, Int32Array, PolicyRecord, Trajectory

Order = dict[str, Any]


class RankCoordinator:
    """The policy trainer of this rank and its place in the gang. Every method blocks; call them from one thread."""

    def __init__(self, trainer: PolicyTrainer, gang: World, checkpoints: CheckpointStore, shelf: PolicyCatalog) -> None:
        self.trainer = trainer
        self.gang = gang
        self.shelf = shelf
        self._checkpoints = checkpoints
        self._known_to_peers: set[int] = set()

    def train(self, batch: Batch, settings: StepSettings | None = None) -> StepReport:
        """One train step on all ranks, with ``settings`` where they are given."""
        remembered = sorted(self.shelf.remembered.items())
        sent = settings and settings.model_dump(mode="json")
        news = {"policies": self._news(), "remembered": remembered, "settings": sent}
        self._order({"do": "train", "train_step": batch.train_step, **news})
        if self.gang.world > 1:
            broadcast_bytes(batch_to_bytes(batch), self.gang)
        return self.trainer.train(batch, self.shelf.train_steps, settings)

    def end_stage(self, trajectories: Sequence[Trajectory], kept: Collection[str]) -> int:
        """Record log-probabilities of unfinished trajectories under the present weights, for ``stage_end``."""
        self._order({"do": "end_stage", "policies": self._news(), "kept": sorted(kept)})
        if self.gang.world > 1:
            held = Group(group_id="", admission_index=0, trajectories=tuple(trajectories))
            broadcast_bytes(batch_to_bytes(Batch(train_step=0, groups=(held,))), self.gang)
        return self.trainer.end_stage(trajectories, self.shelf.train_steps, kept)

    def save(self, session: str, rollback_count: int, extra: Mapping[str, Any]) -> CommittedState:
        """Commit the trainer state; raises CheckpointError."""
        order = {
            "do": "save",
            "session": session,
            "rollback_count": rollback_count,
            "extra": dict(extra) | self.trainer.state_extra(),
        }
        self._order(order)
        return self._save(order)

    def load(self, state: CommittedState) -> Mapping[str, Any]:
        """Take over a committed state; returns its ``extra``. Raises CheckpointError, with weights unchanged."""
        self._order({"do": "load", "folder": state.folder.name})
        return self._load(state)

    def take_weights(self, policy_version: int) -> None:
        """Take the weights of a published policy, forget moments and stages; CheckpointError if it is gone."""
        if self.shelf.folder(policy_version) is None:
            raise CheckpointError(f"policy version {policy_version} is not kept any more")
        self._order({"do": "take_weights", "policy_version": policy_version, "policies": self._news()})
        self._take_weights(policy_version)

    def canary(self, sequences: Sequence[Int32Array]) -> list[CanarySequence]:
        """The fixed sequences with the log-probabilities of the present weights; TrainingDiverged if not all finite."""
        self._order({"do": "canary", "sequences": [s.tolist() for s in sequences]})
        values = self.trainer.logprobs(sequences)
        if not all(np.isfinite(logprobs).all() for logprobs in values):
            raise TrainingDiverged(
                f"train step {self.trainer.train_step}: the log-probabilities of the policy are not finite, so no "
                "generator can serve it. Start a new run from an older policy (model.path), with a lower "
                "trainer.learning_rate"
            )
        return [
            CanarySequence(token_ids=ids.tolist(), logprobs=[float(v) for v in logprobs])
            for ids, logprobs in zip(sequences, values, strict=True)
        ]

    def export(self, folder: Path) -> None:
        """Write the present weights as a Hugging Face folder."""
        self._order({"do": "export"})
        self.trainer.export(folder)

    def idle(self) -> None:
        """Tell the others that rank 0 lives, so that their wait for the next order does not time out."""
        self._order({"do": "idle"})

    def dismiss(self) -> None:
        """End the others' ``follow``."""
        self._order({"do": "leave"})

    def follow(self, scratch: Path) -> None:
        """Carry out rank 0's orders until it says leave; ``scratch`` is never written to."""
        while True:
            order = json.loads(broadcast_bytes(None, self.gang))
            if order["do"] == "leave":
                return
            self._carry_out(order, scratch)

    def _carry_out(self, order: Order, scratch: Path) -> None:
        match order["do"]:
            case "train":
                self.shelf.update(PolicyRecord(**record) for record in order["policies"])
                self.shelf.remember(dict(order["remembered"]))
                batch = batch_from_bytes(order["train_step"], broadcast_bytes(None, self.gang))
                settings = order["settings"] and StepSettings(**order["settings"])
                self.trainer.train(batch, self.shelf.train_steps, settings)
            case "end_stage":
                self.shelf.update(PolicyRecord(**record) for record in order["policies"])
                held = batch_from_bytes(0, broadcast_bytes(None, self.gang)).groups
                others = [t for g in held for t in g.trajectories]
                self.trainer.end_stage(others, self.shelf.train_steps, order["kept"])
            case "save":
                self._save_if_there_is_room(order)
            case "load":
                self._load(self._find(order["folder"]))
            case "take_weights":
                self.shelf.update(PolicyRecord(**record) for record in order["policies"])
                self._take_weights(order["policy_version"])
            case "canary":
                self.trainer.logprobs([np.array(ids, np.int32) for ids in order["sequences"]])
            case "export":
                self.trainer.export(scratch)
            case "idle":
                pass
            case other:
                raise ValueError(f"unknown order {other!r}")

    def _order(self, order: Order) -> None:
        if self.gang.world > 1:
            broadcast_bytes(json.dumps(order).encode(), self.gang)

    def _news(self) -> list[dict[str, Any]]:
        """Policies that the other ranks have not been told of."""
        news = [r for r in self.shelf.records if r.policy_version not in self._known_to_peers]
        self._known_to_peers |= {r.policy_version for r in news}
        return [asdict(r) for r in news]

    def _save(self, order: Order) -> CommittedState:
        return self._checkpoints.save_state(
            session=order["session"],
            train_step=self.trainer.train_step,
            rollback_count=order["rollback_count"],
            tensors=self.trainer.state_tensors(),
            extra=order["extra"],
        )

    def _save_if_there_is_room(self, order: Order) -> None:
        """Every rank knows of the failure of one; rank 0 waits for room and gives the order again."""
        try:
            self._save(order)
        except CheckpointError as error:
            if error.reason != Reason.DISK_FULL:
                raise
            get_logger("crew").warning("state_not_saved", rank=self.gang.rank, message=str(error))

    def _load(self, state: CommittedState) -> Mapping[str, Any]:
        tensors = self.trainer.tensors_to_fill(state.record.extra)
        extra = self._checkpoints.load_state(state, tensors)
        self.trainer.restore_extra(extra, tensors)
        return extra

    def _take_weights(self, policy_version: int) -> None:
        folder = self.shelf.folder(policy_version)
        if folder is None:
            raise CheckpointError(f"policy version {policy_version} is not kept any more")
        tensors = self.trainer.state_tensors()
        load_weights(folder, {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")})
        for name, tensor in tensors.items():
            if name.startswith("optimizer."):
                tensor.zero_()
        self.trainer.forget_stages()

    def _find(self, name: str) -> CommittedState:
        for state in self._checkpoints.committed_states():
            if state.folder.name == name:
                return state
        raise CheckpointError(f"{name}: this rank does not see the state that rank 0 loads; is the store shared?")
