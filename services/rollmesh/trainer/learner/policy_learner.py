"""A policy in training: its model, its optimizer, and the passes and copies of its weights."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch.optim import Optimizer

from rollmesh.config.model import AdapterConfig
from rollmesh.config.trainer import OptimizationConfig
from rollmesh.trainer.learner.distributed import World, shard
from rollmesh.trainer.learner.forward_backward import Compute, compute_of
from rollmesh.trainer.learner.frozen_policies import Fp32Copy
from rollmesh.trainer.learner.policy_files import PolicyOutput
from rollmesh.trainer.learner.policy_model import ModelSource, PolicyModel
from rollmesh.trainer.learner.policy_state import build_optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLearner:
    """One policy. Under torchrun every rank must make the same calls."""

    source: ModelSource
    model: PolicyModel
    optimizer: Optimizer
    compute: Compute
    fp32_copy: Fp32Copy
    output: PolicyOutput

    @classmethod
    def load(
        cls,
        folder: Path,
        config: OptimizationConfig,
        *,
        dtype: str,
        adapter: AdapterConfig | None,
        world: World,
        longest: int,
        device: str | None = None,
        compute_dtype: torch.dtype = torch.float32,
        mixed_precision: bool | None = None,
    ) -> Self:
        """Load a policy from a Hugging Face folder, which is the frozen base of the ``adapter`` if there is one.

        ``dtype`` is the dtype of published weights; the weights in training are in ``compute_dtype``.
        ``mixed_precision`` runs the passes in bfloat16; None enables it on CUDA. ``device`` overrides
        ``config.device``. ``longest`` is the number of tokens of the longest sequence of the run; packing is checked at
        this length. Raises CheckpointError or ConfigError.
        """
        compute = compute_of(config, world, device, mixed_precision)
        publish_dtype: torch.dtype = getattr(torch, dtype)
        source = ModelSource(
            folder=folder,
            adapter=adapter,
            base_dtype=publish_dtype,
            half_base=compute.autocast and publish_dtype == torch.bfloat16,
        )
        model = source.load(
            dtype=compute_dtype,
            device=compute.device,
            gradient_checkpointing=config.gradient_checkpointing,
            longest=longest,
            precision=compute.whole_precision,
        )
        fp32_copy = Fp32Copy(model, source, replace(compute, autocast=False, mixed_shards=False))
        compute = compute.sharing(model, config.share_prefixes, longest)
        shard(model, model.causal_lm, world, mixed=compute.mixed_shards)
        return cls(
            source=source,
            model=model,
            optimizer=build_optimizer(model, config, world.size),
            compute=compute,
            fp32_copy=fp32_copy,
            output=PolicyOutput(model, folder, publish_dtype, fp32_copy.compute),
        )
