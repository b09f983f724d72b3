"""The policy trainer: one policy, its optimizer, and the train step.

    batch -> flat columns -> old logprobs -> per minibatch: (micro-batches: forward, loss, backward) -> update -> report

A step is deterministic and the learning rate depends on the step only. Weights and moments are therefore the complete
state, and a replayed step gives the same weights.
"""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollmesh.checkpoints.batches import StepSettings
from rollmesh.config.model import AdapterConfig
from rollmesh.config.old_logprob_methods import EwmaOptions
from rollmesh.config.trainer import TrainerConfig
from rollmesh.errors import DataError
from rollmesh.trainer.learner.distributed import World
from rollmesh.trainer.learner.forward_backward import judge_tokens, score_batch, score_sequences
from rollmesh.trainer.learner.frozen_policies import PolicyFolder, PolicyVersions, WeightAverage
from rollmesh.trainer.learner.method_binding import step_recipe, step_settings
from rollmesh.trainer.learner.old_logprob_scores import OldLogprobScorer, StageRecord, current_version
from rollmesh.trainer.learner.parts import EarlyParts
from rollmesh.trainer.learner.policy_files import PolicyCopy
from rollmesh.trainer.learner.policy_learner import PolicyLearner
from rollmesh.trainer.learner.policy_state import PolicyState, set_hyperparameters
from rollmesh.trainer.learner.step_report import StepReport, active_token_share, batch_stats, policy_stats
from rollmesh.trainer.learner.token_explanation import TokenExplanation, explain_tokens
from rollmesh.trainer.learner.train_step import (
    StepInputs,
    StepPlan,
    StepRunner,
    Update,
    token_results,
    trailing_skipped,
)
from rollmesh.types import Batch, Float32Array, Group, Int32Array, Trajectory

_NO_TENSORS: Mapping[str, Tensor] = MappingProxyType({})


class PolicyTrainer:
    """Trainer of one policy. Under torchrun every rank must make the same calls with the same arguments."""

    def __init__(
        self,
        folder: str | Path,
        config: TrainerConfig,
        *,
        dtype: str = "float32",
        adapter: AdapterConfig | None = None,
        device: str | None = None,
        world: World | None = None,
        max_token_staleness: int | None = None,
        policy_folder: PolicyFolder | None = None,
        compute_dtype: torch.dtype = torch.float32,
        mixed_precision: bool | None = None,
        longest: int = 0,
    ) -> None:
        """Load a policy from a Hugging Face folder (``PolicyLearner.load``). Raises CheckpointError or ConfigError.

        ``max_token_staleness`` masks older tokens. ``policy_folder`` finds earlier versions, for the old-logprob source
        ``snapshot`` and the KL reference.
        """
        self.train_step = 0
        """Number of batches that the policy was trained on."""
        self._config = config
        learner = PolicyLearner.load(
            Path(folder),
            config,
            dtype=dtype,
            adapter=adapter,
            world=world or World(),
            longest=longest,
            device=device,
            compute_dtype=compute_dtype,
            mixed_precision=mixed_precision,
        )
        self._model = model = learner.model
        self._compute = compute = learner.compute
        self._optimizer = learner.optimizer
        self._fp32_copy = learner.fp32_copy
        self._output = learner.output
        self._recipe = step_recipe(config, max_token_staleness)
        self._stage = StageRecord()
        self._average = WeightAverage(model, learner.source, compute)
        self._state = PolicyState(model, self._optimizer, self._stage, self._average)
        versions = PolicyVersions(model, compute, policy_folder)
        self._old_logprob_scorer = OldLogprobScorer(model, compute, self._stage, versions, self._average)
        self._runner = StepRunner(model, self._optimizer, compute, self._old_logprob_scorer)
        self._parts = EarlyParts(self._runner)

    @property
    def parameter_count(self) -> int:
        """Number of parameters of the policy; tied parameters count once."""
        return sum(p.numel() for p in self._model.parameters())

    @property
    def adapter(self) -> AdapterConfig | None:
        """Adapter that is trained, with its layers by name; None if all weights are trained."""
        return self._model.adapter

    def settings(self, train_step: int) -> StepSettings:
        """Return the settings of the run file for a train step."""
        return step_settings(self._config, self._recipe, train_step)

    def train(
        self,
        batch: Batch,
        train_step_of_version: Mapping[int, int],
        settings: StepSettings | None = None,
        replayed: Collection[str] = (),
    ) -> StepReport:
        """Train on one batch and return its report; afterwards ``train_step == batch.train_step``.

        ``train_step_of_version`` maps every version that wrote tokens of the batch to its train step. ``settings`` are
        the settings in the batch file, which may be older than the run file; None uses the run file's. ``replayed`` are
        the groups of earlier batches, which the report counts apart. Raises DataError if the batch does not follow the
        last one or cannot be trained on; the weights are then unchanged.
        """
        if batch.train_step != self.train_step + 1:
            raise DataError(f"batch {batch.train_step} does not follow train step {self.train_step}")
        plan = self._plan(train_step_of_version, settings)
        flat = plan.flatten(batch)
        recipe, rate = plan.recipe, plan.settings.learning_rate
        set_hyperparameters(self._optimizer, rate=rate, betas=recipe.betas, weight_decay=recipe.weight_decay)
        if not self._parts.fit(batch, plan.settings):
            self._parts.forget()  # they were accumulated under other settings, or are of another batch
        self._begin_pass(plan)
        early, scoring_seconds = len(self._parts.group_ids), 0.0
        if early:
            inputs, update = self._parts.finish(plan, batch, flat)
            updates = [update]
        else:
            inputs, updates, scoring_seconds = self._runner.run(plan, flat)
        self.train_step = batch.train_step
        self._stage.forget(t.trajectory_id for g in batch.groups for t in g.trajectories)
        report = self._report(plan, inputs, updates, [group.group_id in replayed for group in batch.groups])
        return replace(report, groups_before_cut=early, seconds={"evidence": scoring_seconds, **report.seconds})

    def _plan(self, train_step_of_version: Mapping[int, int], settings: StepSettings | None = None) -> StepPlan:
        step = self.train_step + 1
        return StepPlan.of(step, settings or self.settings(step), train_step_of_version)

    def _begin_pass(self, plan: StepPlan) -> None:
        if plan.algorithm.old_logprobs == "ewma":
            self._average.start()
        else:
            self._average.drop()
        if self._model.has_dropout:  # a replayed step drops the same inputs
            torch.manual_seed(plan.train_step << 16 | len(self._parts.group_ids))

    def _report(
        self, plan: StepPlan, inputs: StepInputs, updates: Sequence[Update], replayed: Sequence[bool]
    ) -> StepReport:
        """Report a step and add its weights to the average, if there is one; ``replayed`` is [groups]."""
        begin, flat = time.perf_counter(), inputs.flat
        results = token_results(plan, inputs, updates, dropout=self._model.has_dropout)
        average_reset = False
        if plan.algorithm.old_logprobs == "ewma":
            options = EwmaOptions.model_validate(plan.algorithm.old_logprobs_options)
            average_reset = self._average.update(options, active_token_share(flat, results.active))
        again = np.array(replayed)[flat.group_index]
        applied = [update.applied for update in updates]
        return StepReport(
            train_step=plan.train_step,
            loss=float(np.mean([update.done.loss for update in updates])),
            learning_rate=plan.settings.learning_rate,
            rate_factor=float(np.mean([update.rate_factor for update in updates])),
            grad_norm=float(np.mean([update.grad_norm for update in updates])),
            updates=applied.count(True),
            skipped_updates=applied.count(False),
            trailing_skipped_updates=trailing_skipped(applied),
            microbatches=sum(update.done.microbatches for update in updates),
            forward_tokens=sum(update.done.forward_tokens for update in updates),
            groups_before_cut=0,
            average_reset=average_reset,
            replayed_share=float(again.mean()),
            batch=batch_stats(flat.subset(~again)),
            replay=batch_stats(flat.subset(again)) if again.any() else None,
            policy=policy_stats(flat, results, plan.current_version, inputs.old.fallbacks),
            seconds={
                "gradient": sum(update.gradient_seconds for update in updates),
                "update": sum(update.update_seconds for update in updates),
                "statistics": time.perf_counter() - begin,
            },
        )

    @property
    def accumulated_group_ids(self) -> frozenset[str]:
        """Groups of the next batch whose gradient is in the parameters."""
        return self._parts.group_ids

    def accumulate(self, groups: Sequence[Group], train_step_of_version: Mapping[int, int]) -> None:
        """Add the gradient of a part of the next batch to the parameters, before the batch is cut.

        ``train`` continues from it if the batch has these groups with equal contents and the settings of the run file.
        Not for several minibatches: the weights must stay fixed. DataError drops all parts.
        """
        plan = self._plan(train_step_of_version)
        self._begin_pass(plan)
        self._parts.add(plan, groups)

    def logprobs(self, sequences: Sequence[Int32Array], temperature: float = 1.0) -> list[Float32Array]:
        """Score each token given its predecessors: float32 [tokens - 1] per sequence of >= 2 tokens.

        Every rank scores all, never in mixed precision: readers in float32 must reproduce canaries and audits.
        """
        model = self._fp32_copy.current() if self._compute.mixed_shards else self._model
        return score_sequences(model, self._fp32_copy.compute, sequences, temperature)

    def end_stage(
        self,
        trajectories: Sequence[Trajectory],
        train_step_of_version: Mapping[int, int],
        kept: Collection[str] = (),
    ) -> int:
        """Record log-probabilities of unfinished trajectories under the current weights, for ``stage_end``.

        Call it at the barrier, before ``train``, with every trajectory that has new tokens and is not in the batch. The
        records of all others are dropped, except of those in ``kept``. Returns the number of trajectories recorded.
        """
        self._stage.keep([*kept, *(t.trajectory_id for t in trajectories)])
        version = current_version(train_step_of_version, self.train_step)
        return self._old_logprob_scorer.record_stage(trajectories, version)

    def explain(
        self, batch: Batch, train_step_of_version: Mapping[int, int], settings: StepSettings | None = None
    ) -> Iterator[TokenExplanation]:
        """Explain every response token of a batch under the current weights, without training.

        ``settings`` as in ``train``. All minibatches are evaluated like the first one, without the updates between
        them, and ``skip_zero_advantage`` leaves out nothing, so that every token has an old log-probability.
        """
        settings = settings or self.settings(batch.train_step)
        algorithm = settings.recipe.algorithm.model_copy(update={"skip_zero_advantage": False})
        settings = settings.model_copy(update={"recipe": settings.recipe.model_copy(update={"algorithm": algorithm})})
        plan = StepPlan.of(batch.train_step, settings, train_step_of_version)
        inputs = self._runner.inputs(plan, plan.flatten(batch), one_minibatch=True)
        flat, columns = inputs.flat, inputs.columns
        logprobs = score_batch(self._model, self._compute, flat, np.arange(flat.trajectory_count))
        index, judged = judge_tokens(plan.loss, flat, columns, logprobs)
        share = columns.policy_share.numpy()
        old = share * logprobs + (1 - share) * columns.old_logprobs.numpy()
        return explain_tokens(flat, logprobs, old, inputs.old.fell_back, index, judged)

    def export(self, folder: str | Path) -> Mapping[str, str]:
        """Write the policy to a folder; return the digests of the weights by path. Every rank calls; rank 0 writes."""
        copied = self.copy_out()
        return copied.write(Path(folder)) if self._compute.world.leads else {}

    def copy_out(self, *, base: bool = False) -> PolicyCopy:
        """Copy the weights to host memory, to write and score them later (``PolicyOutput.copy_out``)."""
        return self._output.copy_out(base=base)

    def take_weights(self, folder: Path) -> None:
        """Load the weights of a published policy; reset moments, stage records, parts and average. CheckpointError."""
        self._state.take(folder)
        self.forget_unfinished()

    def forget_unfinished(self) -> None:
        """Drop stage records, parts and the average: after a rollback they are of an abandoned branch."""
        self._stage.keep(())
        self._average.drop()
        self._parts.forget()

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the state (``PolicyState.tensors``)."""
        return self._state.tensors()

    def tensors_to_fill(self, extra: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the tensors to load a state with this ``extra`` into. Raises ConfigError for other trained weights."""
        return self._state.tensors_to_fill(extra)

    def state_extra(self) -> dict[str, Any]:
        """Return the rest of the state, as JSON values."""
        return self._state.extra(self.train_step)

    def restore_extra(self, extra: Mapping[str, Any], filled: Mapping[str, Tensor] = _NO_TENSORS) -> None:
        """Restore ``state_extra`` after its ``tensors_to_fill`` are ``filled``."""
        self.train_step = int(extra["train_step"])
        self._parts.forget()
        self._state.restore(extra, filled)
