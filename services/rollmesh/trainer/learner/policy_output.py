"""Published folders of the policy in training: full weights, or an adapter in PEFT form."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rollmesh.checkpoints.describe import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE
from rollmesh.trainer.learner.distributed import World
from rollmesh.trainer.learner.policy_model import PolicyModel, write_policy_folder
from rollmesh.trainer.learner.weight_copy import WeightCopy
from rollmesh.trainer.learner.weight_file import write_weight_file

WriteWeights = Callable[[Path], Mapping[str, str]]
"""Function that writes copied weights to a folder, in any thread, and returns their digest, by path."""


class PolicyOutput:
    """Copies of the weights in host memory, and their folders, in the publishing dtype."""

    def __init__(self, model: PolicyModel, source: Path, dtype: torch.dtype, world: World) -> None:
        self._model = model
        self._source = source
        self._dtype = dtype
        self._world = world
        self._copy = WeightCopy(dtype)

    def copy_out(self, *, base: bool = False) -> WriteWeights:
        """Copy the trained weights, or the base without its adapter; return the function that writes the copy.

        The next call reuses the memory of the copy. Every rank must call it; rank 0 writes.
        """
        if self._model.adapter is None:
            return partial(self._write_full, self._copy.take(self._model.trained_parameters(), self._world))
        if base:
            # Published once: its memory is not kept.
            weights = WeightCopy(self._dtype).take(self._model.base_parameters(), self._world)
            return partial(self._write_full, weights)
        return partial(self._write_adapter, self._copy.take(self._model.trained_parameters(), self._world))

    def _write_full(self, weights: Mapping[str, Tensor], folder: Path) -> Mapping[str, str]:
        return write_policy_folder(folder, weights, self._dtype, self._source)

    def _write_adapter(self, weights: Mapping[str, Tensor], folder: Path) -> Mapping[str, str]:
        folder.mkdir(parents=True, exist_ok=True)
        config = json.dumps(self._model.adapter_file, indent=2, sort_keys=True)
        (folder / ADAPTER_CONFIG_FILE).write_text(f"{config}\n", encoding="utf-8")
        return {ADAPTER_WEIGHTS_FILE: write_weight_file(folder / ADAPTER_WEIGHTS_FILE, weights)}
