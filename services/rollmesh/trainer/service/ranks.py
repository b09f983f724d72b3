"""Coordination of the trainer's ranks: rank 0 sends orders, and every rank makes the same calls in the same order.

An order is one JSON message, broadcast as bytes (never pickle). A batch follows as protobuf frames. A rank that fails
exits with an error, its peers fail in their next collective call, and the launcher restarts all ranks.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rollmesh.checkpoints.batches import StepSettings, decode_groups, encode_groups
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.committed import CommittedState
from rollmesh.errors import CheckpointError, Reason
from rollmesh.runtime.logging import get_logger
from rollmesh.trainer.learner.distributed import World, broadcast_bytes
from rollmesh.trainer.learner.frozen_policies import BASE_VERSION
from rollmesh.trainer.learner.policy_files import PolicyCopy
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.trainer.learner.step_report import StepReport
from rollmesh.trainer.service.policy_catalog import PolicyCatalog, damaged_base
from rollmesh.types import Batch, Float32Array, Group, Int32Array, PolicyRecord, Trajectory

Order = dict[str, Any]


@dataclass(eq=False)
class RankCoordinator:
    """Policy trainer of this rank and its link to the other ranks. Every method blocks; use one thread only."""

    trainer: PolicyTrainer
    world: World
    _checkpoints: CheckpointStore
    catalog: PolicyCatalog
    _known_to_peers: set[int] = field(default_factory=set, init=False)

    def train(self, batch: Batch, settings: StepSettings, replayed: Collection[str] = ()) -> StepReport:
        """Run one train step on all ranks. The report counts ``replayed``, groups of earlier batches, apart."""
        order = {"do": "train", "replayed": list(replayed), "settings": settings}
        report: StepReport = self._order(order | {"remembered": sorted(self.catalog.remembered.items())}, batch)
        return report

    def accumulate(self, groups: Sequence[Group]) -> None:
        """Add the gradient of a part of the next batch on all ranks, before the batch is cut."""
        self._order({"do": "accumulate"}, Batch(train_step=0, groups=tuple(groups)))

    def end_stage(self, trajectories: Sequence[Trajectory], kept: Collection[str]) -> int:
        """Record log-probabilities of unfinished trajectories under the current weights, for ``stage_end``."""
        unfinished = Group(group_id="", admission_index=0, trajectories=tuple(trajectories))
        recorded: int = self._order(
            {"do": "end_stage", "kept": sorted(kept)}, Batch(train_step=0, groups=(unfinished,))
        )
        return recorded

    def save(self, session: str, rollback_count: int, extra: Mapping[str, Any]) -> CommittedState:
        """Commit the trainer state. Raises CheckpointError."""
        order = {"do": "save", "session": session, "rollback_count": rollback_count}
        state: CommittedState = self._order(order | {"extra": dict(extra) | self.trainer.state_extra()})
        return state

    def load(self, state: CommittedState) -> Mapping[str, Any]:
        """Load a committed state and return its ``extra``. On CheckpointError the weights are unchanged."""
        self._send({"do": "load", "folder": state.folder.name})
        return self._load(state)

    def take_weights(self, policy_version: int) -> None:
        """Load the weights of a published policy; reset moments and stage records. CheckpointError if not kept."""
        self._kept_folder(policy_version)
        self._order({"do": "take_weights", "policy_version": policy_version})

    def score(self, sequences: Sequence[Int32Array]) -> list[Float32Array]:
        """Score sequences with the current weights (``PolicyTrainer.logprobs``)."""
        scores: list[Float32Array] = self._order({"do": "score", "sequences": [s.tolist() for s in sequences]})
        return scores

    def copy_out(self, policy_version: int) -> PolicyCopy:
        """Copy the weights to publish as this version to host memory (``PolicyTrainer.copy_out``)."""
        copied: PolicyCopy = self._order({"do": "copy_out", "base": policy_version == BASE_VERSION})
        return copied

    def base_of(self, policy_version: int) -> PolicyRecord | None:
        """Return the base that this version is published above; None for full weights. Raises CheckpointError."""
        adapted = self.trainer.adapter is not None and policy_version != BASE_VERSION
        try:
            return self.catalog.base(BASE_VERSION) if adapted else None
        except CheckpointError as error:
            raise damaged_base(str(error), error.reason) from error

    def idle(self) -> None:
        """Send an order without work: the wait of the other ranks for the next order is limited."""
        self._send({"do": "idle"})

    def dismiss(self, unfinished: str = "") -> None:
        """End ``follow`` on the other ranks, which returns ``unfinished`` there."""
        self._send({"do": "leave", "unfinished": unfinished})

    def follow(self) -> str:
        """Carry out the orders of rank 0 until the order ``leave``; return the work that a shutdown left.

        It is empty when the run is complete. Otherwise no rank may end as if it were: a supervisor of this rank alone
        (a Job, for each of its pods) would not start it again.
        """
        while (order := json.loads(broadcast_bytes(None, self.world)))["do"] != "leave":
            self.catalog.update(PolicyRecord(**record) for record in order["policies"])
            self.catalog.remember(dict(order.get("remembered", ())))
            step = order["batch_of_step"]
            groups = () if step is None else tuple(decode_groups(broadcast_bytes(None, self.world)))
            try:
                self._carry_out(order, Batch(train_step=step or 0, groups=groups), self.catalog.train_steps)
            except CheckpointError as error:
                if order["do"] != "save" or error.reason != Reason.DISK_FULL:
                    raise
                # All ranks fail together, and rank 0 repeats the order later.
                get_logger("ranks").warning("state_not_saved", rank=self.world.rank, message=str(error))
        return str(order["unfinished"])

    def _carry_out(self, order: Order, batch: Batch, train_steps: Mapping[int, int]) -> Any:
        """Carry out an order on this rank; return what it gives. ``train_steps`` are of the moment it was sent."""
        match order["do"]:
            case "train":
                settings = StepSettings.model_validate(order["settings"])  # rank 0 has them as they are
                return self.trainer.train(batch, train_steps, settings, order["replayed"])
            case "accumulate":
                return self.trainer.accumulate(batch.groups, train_steps)
            case "end_stage":
                unfinished = [t for g in batch.groups for t in g.trajectories]
                return self.trainer.end_stage(unfinished, train_steps, order["kept"])
            case "save":
                return self._save(order)
            case "load":
                return self._load(self._find(order["folder"]))
            case "take_weights":
                return self.trainer.take_weights(self._kept_folder(order["policy_version"]))
            case "score":
                return self.trainer.logprobs([np.array(ids, np.int32) for ids in order["sequences"]])
            case "copy_out":
                return self.trainer.copy_out(base=order["base"])
            case "idle":
                return None
        raise ValueError(f"unknown order {order['do']!r}")

    def _order(self, order: Order, batch: Batch | None = None) -> Any:
        """Let every rank carry out an order; return what it gives on this one."""
        train_steps = self._send(order, batch)
        return self._carry_out(order, batch or Batch(train_step=0, groups=()), train_steps)

    def _send(self, order: Order, batch: Batch | None = None) -> Mapping[int, int]:
        """Send an order with the new policies; return the train steps of all, of one moment as announcements go on."""
        records, train_steps = self.catalog.snapshot()
        if self.world.size > 1:
            new = [r for r in records if r.policy_version not in self._known_to_peers]
            self._known_to_peers |= {r.policy_version for r in new}
            sent = order | {"policies": [asdict(r) for r in new], "batch_of_step": batch and batch.train_step}
            broadcast_bytes(json.dumps(sent, default=_plain).encode(), self.world)
            if batch is not None:
                broadcast_bytes(b"".join(encode_groups(batch)), self.world)
        return train_steps

    def _save(self, order: Order) -> CommittedState:
        return self._checkpoints.save_state(
            session=order["session"],
            train_step=self.trainer.train_step,
            rollback_count=order["rollback_count"],
            tensors=self.trainer.state_tensors(),
            extra=order["extra"],
        )

    def _load(self, state: CommittedState) -> Mapping[str, Any]:
        tensors = self.trainer.tensors_to_fill(state.record.extra)
        extra = self._checkpoints.load_state(state, tensors)
        self.trainer.restore_extra(extra, tensors)
        return extra

    def _kept_folder(self, policy_version: int) -> Path:
        try:
            return self.catalog.open(policy_version)
        except CheckpointError as error:
            if error.outside:
                raise
            raise CheckpointError(
                f"policy version {policy_version} is no longer kept ({error}); choose a version that is"
            ) from error

    def _find(self, name: str) -> CommittedState:
        for state in self._checkpoints.committed_states():
            if state.folder.name == name:
                return state
        raise CheckpointError(
            f"{name}: this rank cannot find the state that rank 0 loads; checkpoints.folder must be shared by all ranks"
        )


def _plain(settings: StepSettings) -> dict[str, Any]:
    return settings.model_dump(mode="json")


class TorchExecutor(ThreadPoolExecutor):
    """Executor with one thread, for every torch call of this process, in order."""

    def __init__(self) -> None:
        super().__init__(1, thread_name_prefix="torch")
        self._pending: set[Future[Any]] = set()

    def busy(self) -> bool:
        """Tell whether a call runs or waits for the thread."""
        return bool(self._pending)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(fn, *args, **kwargs)
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        return future
