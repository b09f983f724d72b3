"""Costs of engines and trainers that were not measured, from a GPU's public figures.

A decode step of r calls with C context tokens on t devices with tensor parallelism takes

    o + max(w, p * r) + c * C,    w = 2 M / (t * m * bandwidth),    p = 2 M / (t * f * flops),
                                  c = cache bytes per token and device / (m * bandwidth)

seconds, where M weights of 2 bytes are read once per step and multiplied once per token (2 FLOPs each). m and f are the
shares of the peak rates that real programs reach, o is the engine's own time per step. These three are the same for all
GPUs and models: none is fitted to a published result. Left out: attention FLOPs, activations' memory, and communication
between the devices of a tensor-parallel group.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollmesh.errors import ConfigError
from rollmesh.generator.engines.torch.architecture import Architecture
from rollmesh.sim.decode_curve import EngineCosts
from rollmesh.sim.gpus import Gpu
from rollmesh.sim.model_sizes import WEIGHT_BYTES, kv_bytes_per_token, multiplied_weight_count, weight_count

FORWARD_FLOPS = 2
"""FLOPs per weight and token of a forward pass: a multiplication and an addition."""
TRAIN_FLOPS = 8
"""FLOPs per weight and token of a train step: forward 2, backward 4, and 2 for activations that are computed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiencies:
    """Assumed constants, stated once for every prediction."""

    memory: float = 0.7
    """Reached share of a GPU's memory bandwidth."""
    compute: float = 0.4
    """Reached share of a GPU's dense bf16 rate, in prefills, large decode steps and training."""
    step_seconds: float = 0.003
    """Engine time per decode step that no GPU shortens: scheduling, launches, sampling."""
    cache_share: float = 0.9
    """Share of a GPU's memory for weights and cache of an engine."""

    def __post_init__(self) -> None:
        for name in ("memory", "compute", "cache_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"efficiency {name}={getattr(self, name)}; expected a share above 0 and at most 1")
        if not 0 <= self.step_seconds < 60:
            raise ConfigError(f"efficiency step_seconds={self.step_seconds}; expected seconds from 0 to 60")


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """One generator: a model on ``tensor_parallel`` devices. Raises ConfigError for a model that does not fit."""

    gpu: Gpu
    model: Architecture
    tensor_parallel: int = 1
    efficiencies: Efficiencies = Efficiencies()

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1 or self.model.head_count % self.tensor_parallel:
            raise ConfigError(
                f"tensor_parallel={self.tensor_parallel} does not divide the model's {self.model.head_count} attention "
                "heads"
            )
        if self._free_bytes <= 0:
            gigabytes = weight_count(self.model) * WEIGHT_BYTES / 1e9
            raise ConfigError(
                f"gpu={self.gpu.name}, tensor_parallel={self.tensor_parallel}: weights of {gigabytes:.1f} GB do not "
                f"fit {self.efficiencies.cache_share:g} of {self.tensor_parallel} x {self.gpu.memory_bytes / 1e9:g} "
                "GB; use more devices per generator, a larger GPU or a smaller model"
            )

    def costs(self, slots: int) -> EngineCosts:
        """Return the costs of up to ``slots`` running calls."""
        weights = multiplied_weight_count(self.model) / self.tensor_parallel
        read = WEIGHT_BYTES * weights / self._bytes_per_second
        compute = FORWARD_FLOPS * weights / self._flops_per_second
        slope = kv_bytes_per_token(self.model, self.tensor_parallel) / self._bytes_per_second
        base = (self.efficiencies.step_seconds + max(read, compute * running) for running in range(slots + 1))
        return EngineCosts(base=tuple(base), slope=(slope,) * (slots + 1), prefill_seconds_per_token=compute)

    def cache_tokens(self, longest_call: int) -> int:
        """Return the tokens of the cache. Raises ConfigError if it does not hold a call of ``longest_call`` tokens."""
        tokens = int(self._free_bytes / kv_bytes_per_token(self.model, self.tensor_parallel))
        if tokens < longest_call:
            raise ConfigError(
                f"gpu={self.gpu.name}, tensor_parallel={self.tensor_parallel}: beside the weights there is cache for "
                f"{tokens} tokens, but a call may have {longest_call}; use more devices per generator, a larger GPU or "
                "shorter lengths"
            )
        return tokens

    def train_seconds_per_token(self, devices: int) -> float:
        """Return the seconds of a train step per token on ``devices`` GPUs together."""
        return TRAIN_FLOPS * self._forward_seconds(devices) / FORWARD_FLOPS

    def evidence_seconds_per_token(self, devices: int) -> float:
        """Return the seconds per token of a pass that only computes log-probabilities."""
        return self._forward_seconds(devices)

    def _forward_seconds(self, devices: int) -> float:
        if devices < 1:
            raise ConfigError(f"devices={devices}; a trainer needs at least 1")
        return FORWARD_FLOPS * multiplied_weight_count(self.model) / (devices * self._flops_per_second)

    @property
    def _bytes_per_second(self) -> float:
        return self.efficiencies.memory * self.gpu.bytes_per_second

    @property
    def _flops_per_second(self) -> float:
        return self.efficiencies.compute * self.gpu.flops_per_second

    @property
    def _free_bytes(self) -> float:
        """Bytes for the cache on each device."""
        weights = WEIGHT_BYTES * weight_count(self.model) / self.tensor_parallel
        return self.efficiencies.cache_share * self.gpu.memory_bytes - weights
