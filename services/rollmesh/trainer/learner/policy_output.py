"""Copies of the policy in training, to write and to score while the next step trains."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from rollmesh.checkpoints.describe import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE
from rollmesh.trainer.learner.forward_backward import Compute
from rollmesh.trainer.learner.policy_model import PolicyModel, write_policy_folder
from rollmesh.trainer.learner.policy_scorer import score_sequences
from rollmesh.trainer.learner.weight_copy import WeightCopy
from rollmesh.trainer.learner.weight_file import write_weight_file
from rollmesh.types import Float32Array, Int32Array

WriteWeights = Callable[[Path], Mapping[str, str]]
"""Function that writes copied weights to a folder, in any thread, and returns their digest, by path."""
ScoreSequences = Callable[[Sequence[Int32Array]], list[Float32Array]]
"""Function that scores sequences as ``PolicyTrainer.logprobs`` does, in any thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCopy:
    """Weights of one version in host memory, until the next version is copied."""

    weights: Mapping[str, Tensor]
    """Copied weights, by their published names; empty except on rank 0."""
    write: WriteWeights
    """Writes full weights as a Hugging Face folder, an adapter as a PEFT folder."""
    score: ScoreSequences | None
    """Scores with the copy. None if only the model in training scores: on a GPU, with several ranks, for weights in
    another dtype than the published one, and for the base of an adapter, which is published once."""


class PolicyOutput:
    """Copies of the weights in the publishing dtype, in host memory that every version reuses."""

    def __init__(self, model: PolicyModel, source: Path, dtype: torch.dtype, compute: Compute) -> None:
        self._model = model
        self._source = source
        self._dtype = dtype
        self._compute = compute
        self._weights = WeightCopy(dtype)
        self._scorer: PolicyModel | None = None
        """Second model whose trained parameters are the copied weights."""

    def copy_out(self, *, base: bool = False) -> PolicyCopy:
        """Copy the trained weights, or the base without its adapter.

        The next call reuses the memory of the copy. Every rank must call it; rank 0 writes.
        """
        world = self._compute.world
        if base and self._model.adapter is not None:
            # Published once: its memory is not kept.
            weights = WeightCopy(self._dtype).take(self._model.base_parameters(), world)
            return PolicyCopy(weights=weights, write=partial(self._write_full, weights), score=None)
        weights = self._weights.take(self._model.trained_parameters(), world)
        write = self._write_full if self._model.adapter is None else self._write_adapter
        return PolicyCopy(weights=weights, write=partial(write, weights), score=self._score_with(weights))

    def _score_with(self, weights: Mapping[str, Tensor]) -> ScoreSequences | None:
        trained = self._model.trained_parameters()
        same_dtype = all(parameter.dtype == self._dtype for parameter in trained.values())
        if self._compute.world.size > 1 or self._compute.device.type != "cpu" or not same_dtype:
            return None
        if self._scorer is None:
            self._scorer = _second_model(self._model, weights)
        return partial(score_sequences, self._scorer, self._compute, temperature=1.0)

    def _write_full(self, weights: Mapping[str, Tensor], folder: Path) -> Mapping[str, str]:
        return write_policy_folder(folder, weights, self._dtype, self._source, self._model.config)

    def _write_adapter(self, weights: Mapping[str, Tensor], folder: Path) -> Mapping[str, str]:
        folder.mkdir(parents=True, exist_ok=True)
        config = json.dumps(self._model.adapter_file, indent=2, sort_keys=True)
        (folder / ADAPTER_CONFIG_FILE).write_text(f"{config}\n", encoding="utf-8")
        return {ADAPTER_WEIGHTS_FILE: write_weight_file(folder / ADAPTER_WEIGHTS_FILE, weights)}


def _second_model(model: PolicyModel, weights: Mapping[str, Tensor]) -> PolicyModel:
    """Return a model that computes with ``weights`` in place of the trained parameters, without a copy of them.

    It shares frozen parameters, which never change, with ``model``.
    """
    trained = model.trained_parameters()
    shared = {id(parameter): parameter for parameter in model.parameters()}
    shared |= {id(trained[name]): nn.Parameter(weight, requires_grad=False) for name, weight in weights.items()}
    # deepcopy takes the values of its memo for the objects with these ids.
    return copy.deepcopy(model, memo=dict(shared))
