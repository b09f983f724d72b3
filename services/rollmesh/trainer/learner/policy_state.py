"""State of the policy in training: the trained weights, the moments of the optimizer, stage records and the average."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollmesh.checkpoints.adapter_settings import read_adapter_settings
from rollmesh.checkpoints.describe import ADAPTER_CONFIG_FILE
from rollmesh.checkpoints.reasons import Reason
from rollmesh.checkpoints.states import load_weights
from rollmesh.config.model import AdapterConfig
from rollmesh.errors import CheckpointError, ConfigError
from rollmesh.trainer.learner.adapter_layers import reset_adapter
from rollmesh.trainer.learner.frozen_policies import WeightAverage
from rollmesh.trainer.learner.old_logprob_scores import StageRecord
from rollmesh.trainer.learner.optimizer import saved_moments
from rollmesh.trainer.learner.policy_model import PolicyModel

_STAGE_TENSOR, _STAGE_LAYOUT, _ADAPTER = "stage.logprobs", "stage", "adapter"


@dataclass(eq=False)
class PolicyState:
    """Tensors and JSON values of a trainer state. With an adapter they leave the frozen base out."""

    _model: PolicyModel
    _optimizer: torch.optim.Optimizer
    _stage: StageRecord
    _average: WeightAverage

    def tensors(self) -> dict[str, Tensor]:
        """Return weights and moments by name: the live (possibly sharded) tensors, to save or to fill in place.

        With the old-logprob source ``stage_end`` the result includes a copy of the recorded log-probabilities, with
        ``ewma`` the average of the weights.
        """
        recorded = torch.from_numpy(self._stage.values())
        return self._live() | self._average.tensors() | ({_STAGE_TENSOR: recorded} if len(recorded) else {})

    def tensors_to_fill(self, extra: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the tensors to load a state with this ``extra`` into: live ones, and those of stage and average.

        Raises ConfigError for a state of other trained weights: it must not be skipped like a damaged one.
        """
        saved = extra.get(_ADAPTER)
        if saved != self._adapter():
            raise ConfigError(
                f"model.adapter={_named(self._adapter())}: this run was trained with {_named(saved)}; set "
                "model.adapter as it was, or start a new run (another name and folder)"
            )
        recorded = sum(int(count) for _, count, _ in extra.get(_STAGE_LAYOUT, ()))
        live = self._live() | self._average.tensors_to_fill(extra)
        return live | ({_STAGE_TENSOR: torch.empty(recorded)} if recorded else {})

    def extra(self, train_step: int) -> dict[str, Any]:
        """Return the rest of the state, as JSON values."""
        layout, adapter = self._stage.layout(), self._adapter()
        return (
            {"train_step": train_step}
            | self._average.extra()
            | ({_STAGE_LAYOUT: layout} if layout else {})
            | ({_ADAPTER: adapter} if adapter else {})
        )

    def restore(self, extra: Mapping[str, Any], filled: Mapping[str, Tensor]) -> None:
        """Restore ``extra`` after its ``tensors_to_fill`` are ``filled``."""
        self._average.restore(extra)
        values = filled.get(_STAGE_TENSOR, torch.empty(0))
        self._stage.restore(extra.get(_STAGE_LAYOUT, ()) if len(values) else (), values.numpy())

    def take(self, folder: Path) -> None:
        """Load the weights of a published policy and reset the moments. The base itself is an adapter at its start.

        Raises CheckpointError if the folder does not fit, with the weights unchanged.
        """
        adapter = self._model.adapter
        if adapter is not None and not (folder / ADAPTER_CONFIG_FILE).is_file():
            reset_adapter(self._model.causal_lm)
        else:
            if adapter is not None:
                _require_equal(folder, read_adapter_settings(folder), adapter)
            load_weights(folder, {name: p.detach() for name, p in self._model.trained_parameters().items()})
        for parameter in self._model.trained_parameters().values():
            for value in saved_moments(self._optimizer, parameter).values():
                value.zero_()

    def _live(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._model.trained_parameters().items():
            tensors[f"model.{name}"] = parameter.detach()
            for key, value in saved_moments(self._optimizer, parameter).items():
                tensors[f"optimizer.{name}.{key}"] = value
        return tensors

    def _adapter(self) -> dict[str, Any] | None:
        """Return the settings that fix the adapter's tensors and their effect; None for full weights."""
        adapter = self._model.adapter
        if adapter is None:
            return None
        return {"rank": adapter.rank, "alpha": adapter.alpha, "target": list(adapter.target)}


def _require_equal(folder: Path, found: AdapterConfig, adapter: AdapterConfig) -> None:
    for name in ("rank", "alpha", "target"):
        theirs, ours = getattr(found, name), getattr(adapter, name)
        if theirs != ours:
            raise CheckpointError(
                f"{folder}: the adapter has {name} {theirs}, but model.adapter.{name} is {ours}",
                reason=Reason.FOREIGN_ARCHITECTURE,
            )


def _named(adapter: Mapping[str, Any] | None) -> str:
    if adapter is None:
        return "null (full weights)"
    return ", ".join(f"{name} {adapter[name]}" for name in ("rank", "alpha", "target"))
