"""Published policies as models: full weights, or an adapter above its base."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from rollmesh.checkpoints.adapter_settings import read_adapter_settings
from rollmesh.checkpoints.describe import ADAPTER_WEIGHTS_FILE
from rollmesh.checkpoints.policies import VerifiedPolicy
from rollmesh.checkpoints.reasons import Reason
from rollmesh.checkpoints.states import load_weights
from rollmesh.errors import CheckpointError, ConfigError
from rollmesh.trainer.learner.adapter_layers import merge_adapter
from rollmesh.trainer.learner.policy_model import ModelSource, PolicyModel, load_policy_model, write_policy_folder

_DTYPES: Mapping[str, torch.dtype] = {"BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


def load_published(policy: VerifiedPolicy, *, dtype: torch.dtype, device: torch.device) -> PolicyModel:
    """Load a published policy in ``dtype``, with its adapter applied in the forward pass.

    Raises CheckpointError if the policy cannot be read, or if its adapter does not fit its base.
    """
    if policy.base is None:
        return load_policy_model(policy.folder, dtype=dtype, device=device)
    adapter = read_adapter_settings(policy.folder)
    try:
        model = ModelSource(folder=policy.base.folder, adapter=adapter).load(dtype=dtype, device=device)
    except ConfigError as error:
        problem = f"{policy.folder}: the adapter does not fit its base: {error}"
        raise CheckpointError(problem, reason=Reason.FOREIGN_ARCHITECTURE) from error
    tensors = {name: parameter.detach() for name, parameter in model.trained_parameters().items()}
    with safe_open(policy.folder / ADAPTER_WEIGHTS_FILE, framework="pt") as file:
        different = sorted(set(file.keys()) ^ tensors.keys())
    if different:
        raise CheckpointError(
            f"{policy.folder / ADAPTER_WEIGHTS_FILE}: its tensors are not A and B of the adapted layers: "
            f"{different[0]} ({len(different)} in total)",
            reason=Reason.FOREIGN_ARCHITECTURE,
        )
    load_weights(policy.folder, tensors)
    return model


def write_merged(policy: VerifiedPolicy, folder: Path) -> None:
    """Write an adapter and its base as one Hugging Face folder, in the dtype of the base.

    The sum is computed in float32. Raises CheckpointError as ``load_published`` does.
    """
    if policy.base is None:
        raise ValueError(f"{policy.folder}: full weights have no adapter to merge")
    model = load_published(policy, dtype=torch.float32, device=torch.device("cpu"))
    merge_adapter(model.causal_lm)
    weights = {name: parameter.detach() for name, parameter in model.base_parameters().items()}
    dtype = _DTYPES.get(policy.base.manifest.dtype, torch.float32)
    write_policy_folder(folder, weights, dtype, policy.base.folder, model.config)
