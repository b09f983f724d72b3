"""Settings of a simulation, from a run file and from what the run file does not say: devices, lengths, times."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from rollmesh.config import RunConfig
from rollmesh.config.section import Section
from rollmesh.errors import ConfigError
from rollmesh.scheduling import Schedule, run_limits
from rollmesh.scheduling.next_policy import ReloadRules
from rollmesh.sim.decode_curve import DecodeCurve, EngineCosts
from rollmesh.sim.event_clock import MOST_EVENTS
from rollmesh.sim.failures import FailurePlan
from rollmesh.sim.fleet import FleetSettings
from rollmesh.sim.gpus import find_gpu
from rollmesh.sim.length_names import parse_lengths
from rollmesh.sim.lengths import LengthModel
from rollmesh.sim.model_sizes import WEIGHT_BYTES, find_model, weight_count
from rollmesh.sim.prompts import SimulatedPrompts
from rollmesh.sim.reward_model import RewardModel, SolveModel
from rollmesh.sim.roofline import Efficiencies, Roofline
from rollmesh.sim.simulated_mesh import MeshSettings
from rollmesh.sim.trainer_model import TrainerModel
from rollmesh.worker.routing import Placement

DEFAULT_RUN = Path(__file__).parent / "default_run.yaml"
"""Run file of a simulation without one."""
SCALE_RUN = Path(__file__).parent / "scale_run.yaml"
"""Run file of ``rollmesh sim --scale``."""
_EVIDENCE_PASSES = {"recompute": 1, "snapshot": 1, "stage_end": 1}
"""Passes of the trainer for each source of old logprobs; other sources need none."""
_LONG = 10**12


class SimulationSetup(Section):
    """Devices, lengths and times. The constants hold for every run; none is tuned to a published result."""

    gpu: str = "H100"
    """GPU of the table."""
    model: str = "7b"
    """Model of the table, or a Hugging Face folder."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Devices of one generator."""
    trainer_devices: int = Field(default=8, ge=1)
    """Devices of the trainer."""
    colocated: bool = False
    """True if trainer and generators share their devices."""
    switch_seconds: float = Field(default=5.0, ge=0)
    """Time to hand shared devices over, in each direction."""
    curve: str | None = None
    """File of a measured decode curve; null uses the roofline of the GPU."""
    lengths: str = "deepcoder-14b"
    """Lengths of the responses; see docs/simulator.md."""
    growth_per_step: float = Field(default=0.0, gt=-1)
    """Relative growth of the lengths per train step."""
    prompt_tokens: int | None = Field(default=None, ge=1)
    """Tokens of a prompt; null is half of data.max_prompt_tokens."""
    prompts: int = Field(default=10_000, ge=1)
    """Prompts of an epoch."""
    step_fixed_seconds: float = Field(default=5.0, ge=0)
    """Seconds of an optimizer step that no token adds to; a train step has trainer.minibatches of them."""
    storage_bytes_per_second: float = Field(default=5e9, gt=0)
    """Rate at which weights are written, and read by each generator."""
    swap_seconds: float = Field(default=1.0, ge=0)
    """Time for which a generator decodes nothing, because it swaps weights."""
    reward_seconds: float = Field(default=1.0, ge=0)
    """Median time to score an answer."""
    reward_sigma: float = Field(default=0.5, ge=0)
    """Standard deviation of its logarithm."""
    reward_workers: int = Field(default=64, ge=1)
    """Answers that are scored at the same time."""
    seed: int = Field(default=0, ge=0)
    """Seed of lengths, rewards and failures."""


def mesh_settings(
    config: RunConfig,
    setup: SimulationSetup,
    failures: FailurePlan | None = None,
    *,
    is_long: bool = False,
    efficiencies: Efficiencies | None = None,
) -> MeshSettings:
    """Return the settings of a simulation; raises ConfigError for values that do not fit together.

    Other ``efficiencies`` than the assumed ones show how much a result depends on them.
    """
    schedule = Schedule.from_config(config)
    roofline = Roofline(
        gpu=find_gpu(setup.gpu),
        model=find_model(setup.model),
        tensor_parallel=setup.tensor_parallel,
        efficiencies=efficiencies or Efficiencies(),
    )
    generator, prompt_tokens = config.generator, setup.prompt_tokens or max(1, config.data.max_prompt_tokens // 2)
    longest = prompt_tokens + config.rollout.max_new_tokens
    if longest > generator.max_context_tokens:
        raise ConfigError(
            f"prompt_tokens={prompt_tokens} and rollout.max_new_tokens={config.rollout.max_new_tokens} exceed "
            f"generator.max_context_tokens={generator.max_context_tokens}; lower them or raise the context"
        )
    return MeshSettings(
        schedule=schedule,
        limits=run_limits(config),
        fleet=FleetSettings(
            count=generator.replicas,
            slots=generator.slots,
            cache_tokens=generator.kv_token_capacity or roofline.cache_tokens(longest),
            costs=_costs(setup, roofline, generator.slots),
            fetch_seconds=_transfer_seconds(setup, roofline),
            swap_seconds=setup.swap_seconds,
            on_new_version=generator.on_new_version,
            rules=ReloadRules.from_config(config),
            placement=Placement(config.rollout.placement),
        ),
        prompts=SimulatedPrompts(
            lengths=_lengths(config, setup),
            solver=SolveModel(seed=setup.seed),
            count=setup.prompts,
            prompt_tokens=prompt_tokens,
            groups_per_batch=schedule.groups_per_batch,
            repeats=schedule.prompt_repeats,
        ),
        trainer=_trainer(config, setup, roofline),
        rewards=RewardModel(
            median_seconds=setup.reward_seconds,
            sigma=setup.reward_sigma,
            worker_count=setup.reward_workers,
            seed=setup.seed,
        ),
        partial_save_tokens=config.rollout.partial_save_tokens,
        devices=_devices(setup, generator.replicas),
        failures=failures or FailurePlan(seed=setup.seed),
        most_events=_LONG if is_long else MOST_EVENTS,
    )


def _lengths(config: RunConfig, setup: SimulationSetup) -> LengthModel:
    named, longest = parse_lengths(setup.lengths), config.rollout.max_new_tokens
    if named.known_to is not None and longest > named.known_to:
        raise ConfigError(
            f"lengths={setup.lengths} is known up to {named.known_to} tokens; rollout.max_new_tokens={longest} exceeds "
            "it: lower it, or give lengths=lognormal:median=M,sigma=S,share=H"
        )
    return LengthModel(
        marginal=named.marginal,
        prompt_share=named.prompt_share,
        cap=longest,
        growth_per_step=setup.growth_per_step,
        seed=setup.seed,
    )


def _trainer(config: RunConfig, setup: SimulationSetup, roofline: Roofline) -> TrainerModel:
    devices = setup.trainer_devices
    return TrainerModel(
        fixed_seconds=setup.step_fixed_seconds * config.trainer.minibatches,
        seconds_per_token=roofline.train_seconds_per_token(devices),
        evidence_passes=_EVIDENCE_PASSES.get(config.trainer.algorithm.old_logprobs, 0),
        evidence_seconds_per_token=roofline.evidence_seconds_per_token(devices),
        publication_seconds=_transfer_seconds(setup, roofline),
        colocated=setup.colocated,
        switch_seconds=setup.switch_seconds if setup.colocated else 0.0,
    )


def _transfer_seconds(setup: SimulationSetup, roofline: Roofline) -> float:
    """Return the time to write or to read the weights."""
    return WEIGHT_BYTES * weight_count(roofline.model) / setup.storage_bytes_per_second


def _costs(setup: SimulationSetup, roofline: Roofline, slots: int) -> EngineCosts:
    return roofline.costs(slots) if setup.curve is None else DecodeCurve.read(Path(setup.curve)).costs(slots)


def _devices(setup: SimulationSetup, generators: int) -> int:
    """Return the devices of the whole mesh."""
    of_generators = generators * setup.tensor_parallel
    if not setup.colocated:
        return of_generators + setup.trainer_devices
    if setup.trainer_devices != of_generators:
        raise ConfigError(
            f"colocated with trainer_devices={setup.trainer_devices}: the {generators} generators have "
            f"{of_generators} devices; set trainer_devices={of_generators}"
        )
    return of_generators
