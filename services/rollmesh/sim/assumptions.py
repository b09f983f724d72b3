"""All that a simulation assumes and the run file does not say, for the user to judge its figures by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from rollmesh.config import RunConfig
from rollmesh.sim.model_sizes import WEIGHT_BYTES
from rollmesh.sim.roofline import FORWARD_FLOPS, TRAIN_FLOPS, Efficiencies
from rollmesh.sim.simulated_leader import LOOK_SECONDS
from rollmesh.sim.simulated_mesh import MeshSettings
from rollmesh.sim.simulated_worker import NOTICE_SECONDS
from rollmesh.sim.simulation_setup import SimulationSetup, model_name

_OF_A_MODEL = ("gpu", "tensor_parallel", "trainer_devices", "colocated", "switch_seconds", "curve")
_OF_TIMES = ("step_fixed_seconds", "storage_bytes_per_second", "swap_seconds", "reward_seconds", "reward_sigma")
MEASURED = (*_OF_A_MODEL, "model", *_OF_TIMES, "reward_workers")
"""Settings that a calibration on a run replaces."""


def assumptions(
    config: RunConfig, setup: SimulationSetup, settings: MeshSettings, calibrated_on: str = ""
) -> dict[str, object]:
    """Return settings and constants by name; with ``calibrated_on`` the measured times instead of those of devices."""
    if not calibrated_on:
        setup = setup.model_copy(update={"model": model_name(config, setup)})
    assumed: dict[str, object] = setup.model_dump(exclude_none=True)
    assumed |= {"prompt_tokens": settings.prompts.prompt_tokens, "prompts": settings.prompts.count}
    assumed |= {"cache_tokens": settings.fleet.cache_tokens, "solve_rate": "uniform, not changed by training"}
    assumed |= {"worker_notice_seconds": NOTICE_SECONDS, "leader_look_seconds": LOOK_SECONDS}
    if calibrated_on:
        kept = {name: value for name, value in assumed.items() if name not in MEASURED}
        return {"calibrated_on": calibrated_on, **_measured(settings), **kept}
    flops = {"forward_flops_per_weight": FORWARD_FLOPS, "train_flops_per_weight": TRAIN_FLOPS}
    return assumed | {"weight_bytes": WEIGHT_BYTES} | asdict(Efficiencies()) | flops


def _measured(settings: MeshSettings) -> Mapping[str, object]:
    fleet, trainer = settings.fleet, settings.trainer
    times = {
        "decode_step_seconds": fleet.costs.base[0],
        "seconds_per_sampled_token": fleet.costs.base[1] - fleet.costs.base[0],
        "seconds_per_prefilled_token": fleet.costs.prefill_seconds_per_token,
        "fetch_seconds": fleet.fetch_seconds,
        "swap_seconds": fleet.swap_seconds,
        "step_fixed_seconds": trainer.fixed_seconds,
        "train_seconds_per_token": trainer.seconds_per_token,
        "publish_seconds": trainer.publish_seconds(),
        "reward_seconds": settings.rewards.median_seconds,
    }
    shared = "generators and trainer never slow each other"
    if settings.cores is not None:
        shared = f"{settings.cores.cores}, shared by {settings.cores.generators} generators and the trainer"
    return {name: f"{value:.3g}" for name, value in times.items()} | {"cores": shared}
