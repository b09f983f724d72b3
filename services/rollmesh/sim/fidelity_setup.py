"""Simulations of published set-ups, with the constants that no source states: the same in every row.

Two of them follow from a row by a rule. A generator has the fewest GPUs, a power of 2, on which the weights take at
most half of the memory. Lengths are those of a public trace of the same kind of model. That of a reasoning model knows
longer responses than any row allows, and is cut at the row's cap. That of a base model ends at half of its own cap, and
is scaled by the row's cap over its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollmesh.config import load_run_config
from rollmesh.errors import ConfigError
from rollmesh.scheduling.companions import companion_settings
from rollmesh.scheduling.presets import PRESETS
from rollmesh.sim.arms import parse_setup
from rollmesh.sim.gpus import find_gpu
from rollmesh.sim.model_sizes import WEIGHT_BYTES, find_model, weight_count
from rollmesh.sim.published_speed_ups import PublishedArm, PublishedSetup
from rollmesh.sim.roofline import Efficiencies
from rollmesh.sim.simulated_mesh import MeshSettings
from rollmesh.sim.simulation_setup import DEFAULT_RUN, SimulationSetup, mesh_settings

_WITH_OWN_PASS = ("recompute", "current")
"""Old logprobs for which the published systems make a pass, also with one minibatch, where ours needs none."""
_WEIGHT_SHARE = 0.5
_SETTABLE = (
    "seed",
    "switch_seconds",
    "step_fixed_seconds",
    "storage_bytes_per_second",
    "swap_seconds",
    "reward_seconds",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Constants that no source of a row states."""

    gpu: str = "H800"
    """Where a source names no GPU: AReaL, RollPacker and RollArt have it, APRIL H100, verl H20."""
    prompt_tokens: int = 256
    """Between the mean prompts of the public traces: 161 (math) and 485 (code)."""
    slots: int = 256
    """Calls of a generator at the same time: the default of vLLM."""
    train_steps: int = 20
    reasoning_lengths: str = "intern-s1-math"
    """R1-Distill and Qwen3. ``{cap}`` is the most tokens of a response of the row."""
    base_lengths: str = "dapo-32b:cap={cap}"
    """Qwen2.5."""
    efficiencies: Efficiencies = field(default_factory=Efficiencies)
    times: Mapping[str, float] = field(default_factory=dict)
    """Other times, and the seed, of ``SimulationSetup``, for every row."""


def assumptions_with(settings: Sequence[str]) -> Assumptions:
    """Return the assumptions with other times, as ``name=value``. Raises ConfigError for another name or value."""
    for item in settings:
        if item.partition("=")[0] not in _SETTABLE:
            raise ConfigError(f"--with {item}: --fidelity takes {', '.join(_SETTABLE)}, for all rows")
    setup = parse_setup(settings)
    return Assumptions(times={name: getattr(setup, name) for name in setup.model_fields_set})


def arm_settings(setup: PublishedSetup, arm: PublishedArm, assumptions: Assumptions) -> MeshSettings:
    """Return the simulation of the method or of the baseline of a row."""
    gpu = setup.gpu or assumptions.gpu
    groups, devices = setup.groups_per_batch, _tensor_parallel(setup.model, gpu)
    overrides = [
        *companion_settings(PRESETS[arm.preset]),
        f"schedule.preset={arm.preset}",
        f"schedule.groups_per_batch={groups}",
        f"schedule.group_size={setup.group_size}",
        f"trainer.minibatches={setup.optimizer_steps}",
        f"trainer.train_steps={assumptions.train_steps}",
        f"data.max_prompt_tokens={assumptions.prompt_tokens}",
        f"rollout.max_new_tokens={setup.response_tokens}",
        f"generator.max_context_tokens={assumptions.prompt_tokens + setup.response_tokens}",
        f"generator.replicas={arm.generator_gpus // devices}",
        f"generator.slots={assumptions.slots}",
        *arm.settings,
    ]
    if arm.window_batches is not None:
        overrides.append(f"schedule.window_groups={math.ceil(arm.window_batches * groups)}")
    values: dict[str, Any] = {
        "gpu": gpu,
        "model": setup.model,
        "tensor_parallel": devices,
        "trainer_devices": arm.trainer_gpus or arm.generator_gpus,
        "colocated": not arm.trainer_gpus,
        "lengths": _lengths(setup.model, assumptions).format(cap=setup.response_tokens),
        "prompt_tokens": assumptions.prompt_tokens,
        "reward_workers": groups * setup.group_size,
        **assumptions.times,
    }
    config = load_run_config(DEFAULT_RUN, overrides)
    settings = mesh_settings(config, SimulationSetup.model_validate(values), efficiencies=assumptions.efficiencies)
    if config.trainer.algorithm.old_logprobs not in _WITH_OWN_PASS:
        return settings
    return replace(settings, trainer=replace(settings.trainer, evidence_passes=1))


def _lengths(model: str, assumptions: Assumptions) -> str:
    return assumptions.base_lengths if model.startswith("qwen2.5") else assumptions.reasoning_lengths


def _tensor_parallel(model: str, gpu: str) -> int:
    weights, memory, devices = WEIGHT_BYTES * weight_count(find_model(model)), find_gpu(gpu).memory_bytes, 1
    while weights > _WEIGHT_SHARE * devices * memory:
        devices *= 2
    return devices
