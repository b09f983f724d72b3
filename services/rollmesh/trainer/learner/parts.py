"""Parts of a batch: groups whose gradient is computed before the batch is cut, at the weights of its train step.

The gradients of the parts are in the parameters, not yet divided by the divisor of the batch. The batch may use them
only if it has the same groups with the same contents and settings: a queue that came back with an earlier state may
have generated a group again.
"""

import hashlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from rollmesh.algorithms.ratios import OldLogprobs
from rollmesh.checkpoints.batches import StepSettings, encode_groups
from rollmesh.trainer.learner.forward_backward import GradientPass, accumulate_gradient
from rollmesh.trainer.learner.train_batch import TrainBatch
from rollmesh.trainer.learner.train_step import StepInputs, StepPlan, StepRunner, Update, token_columns
from rollmesh.types import Batch, Group, Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Groups of one batch, and the results of their gradient pass with the divisor 1."""

    digests: Mapping[str, bytes]
    """Digest of the contents of each group, by group id."""
    inputs: StepInputs
    done: GradientPass
    seconds: float
    """Wall time of the pass, with its evidence."""


@dataclass(eq=False)
class EarlyParts:
    """Parts of the next batch whose gradient is in the parameters, in order."""

    _runner: StepRunner
    _parts: list[Part] = field(default_factory=list, init=False)
    _settings: StepSettings | None = field(default=None, init=False)

    @property
    def group_ids(self) -> frozenset[str]:
        """Groups in the parts."""
        return frozenset(self._known())

    def fit(self, batch: Batch, settings: StepSettings) -> bool:
        """Tell whether every part belongs to this batch, with equal contents and settings; False without a part."""
        steps = {part.inputs.flat.train_step for part in self._parts}
        if settings != self._settings or steps - {batch.train_step}:
            return False
        known = self._known()
        return known.items() <= _digests(g for g in batch.groups if g.group_id in known).items()

    def forget(self) -> None:
        """Drop the gradients of all parts: their batch is not trained on these weights."""
        self._parts.clear()
        self._runner.optimizer.zero_grad(set_to_none=True)

    def add(self, plan: StepPlan, groups: Iterable[Group]) -> None:
        """Add the gradient of these groups to the parameters. Raises DataError; then all parts are dropped."""
        try:
            self._add(plan, tuple(groups))
        except BaseException:
            self.forget()  # an interrupted pass may have added some of its gradient
            raise

    def _add(self, plan: StepPlan, groups: tuple[Group, ...]) -> None:
        begin, runner = time.perf_counter(), self._runner
        flat = plan.flatten(Batch(train_step=plan.train_step, groups=groups))
        inputs = runner.inputs(plan, flat, one_minibatch=True)
        every = np.arange(flat.trajectory_count)
        done = accumulate_gradient(
            runner.model, runner.compute, plan.loss, inputs.flat, inputs.columns, every, divisor=1.0
        )
        seconds = time.perf_counter() - begin
        self._settings = plan.settings
        self._parts.append(Part(digests=_digests(groups), inputs=inputs, done=done, seconds=seconds))

    def finish(self, plan: StepPlan, batch: Batch, flat: TrainBatch) -> tuple[StepInputs, Update]:
        """Accumulate the groups that are in no part, then update once with the gradient of all parts."""
        known = self._known()
        if rest := tuple(group for group in batch.groups if group.group_id not in known):
            self._add(plan, rest)
        seconds = sum(part.seconds for part in self._parts)
        inputs, done = self._joined(replace(flat, passed=plan.passed(flat)))
        self._parts.clear()
        for parameter in self._runner.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(max(1.0, done.weight))
        return inputs, self._runner.update(plan, inputs.flat, done, np.arange(flat.trajectory_count), seconds)

    def _joined(self, flat: TrainBatch) -> tuple[StepInputs, GradientPass]:
        """Join the results of the parts, which together are this batch. The loss is divided, the gradient is not."""
        parts = self._parts
        inputs, passes = [part.inputs for part in parts], [part.done for part in parts]
        places = [_places(flat, each.flat) for each in inputs]

        def join(columns: Iterable[Tensor]) -> Tensor:
            found = list(columns)
            joined = torch.zeros(len(flat.token_ids), dtype=found[0].dtype)
            for place, column in zip(places, found, strict=True):
                joined[place] = column
            return joined

        old = OldLogprobs(
            values=join(each.old.values for each in inputs),
            from_trainer=join(each.old.from_trainer for each in inputs),
            fell_back={
                reason: join(each.old.fell_back[reason] for each in inputs) for reason in inputs[0].old.fell_back
            },
        )
        share = join(each.columns.policy_share for each in inputs)
        references = [each.columns.reference_logprobs for each in inputs]
        reference = None if references[0] is None else join(r for r in references if r is not None)
        weight = sum(done.weight for done in passes)
        whole = GradientPass(
            loss=sum(done.loss for done in passes) / max(1.0, weight),
            weight=weight,
            logprobs=join(torch.from_numpy(done.logprobs) for done in passes).numpy(),
            entropy=join(torch.from_numpy(done.entropy) for done in passes).numpy(),
            forward_kl=join(torch.from_numpy(done.forward_kl) for done in passes).numpy(),
            microbatches=sum(done.microbatches for done in passes),
            forward_tokens=sum(done.forward_tokens for done in passes),
        )
        return StepInputs(flat=flat, columns=token_columns(flat, old, share, reference), old=old), whole

    def _known(self) -> dict[str, bytes]:
        return {group_id: digest for part in self._parts for group_id, digest in part.digests.items()}


def _digests(groups: Iterable[Group]) -> dict[str, bytes]:
    contents = {group.group_id: b"".join(encode_groups(Batch(train_step=0, groups=(group,)))) for group in groups}
    return {group_id: hashlib.blake2b(data, digest_size=16).digest() for group_id, data in contents.items()}


def _places(flat: TrainBatch, part: TrainBatch) -> Int64Array:
    """Return the position in ``flat`` of every token of a part."""
    at = {trajectory_id: i for i, trajectory_id in enumerate(flat.trajectory_ids)}
    rows = [at[trajectory_id] for trajectory_id in part.trajectory_ids]
    return np.concatenate([np.arange(flat.starts[row], flat.starts[row + 1]) for row in rows])
