"""Small simulated meshes for tests: four generators, batches of 16 trajectories, lengths around 300 tokens."""

from rollmesh.config import RunConfig
from rollmesh.scheduling import Schedule, run_limits
from rollmesh.scheduling.axes import Harvest
from rollmesh.scheduling.next_policy import ReloadRules
from rollmesh.scheduling.presets import PRESETS, companion_fields
from rollmesh.sim.decode_curve import EngineCosts
from rollmesh.sim.failures import FailurePlan
from rollmesh.sim.fleet import FleetSettings
from rollmesh.sim.lengths import LengthModel, Lognormal
from rollmesh.sim.prompts import SimulatedPrompts
from rollmesh.sim.reward_model import RewardModel, SolveModel
from rollmesh.sim.simulated_mesh import MeshSettings, SimulatedMesh
from rollmesh.sim.simulated_trainer import TrainerModel
from rollmesh.sim.simulation_setup import parse_items
from rollmesh.worker.routing import Placement

SLOTS = 8
COSTS = EngineCosts(
    base=tuple(0.01 + 0.0001 * running for running in range(SLOTS + 1)),
    slope=(1e-7,) * (SLOTS + 1),
    prefill_seconds_per_token=1e-5,
)


def mesh_settings(
    preset="copris",
    *,
    steps=6,
    seed=0,
    failures=(),
    cache_tokens=20_000,
    colocated=False,
    generator=None,
    rollout=None,
    **schedule,
) -> MeshSettings:
    groups = 16 if PRESETS[preset].harvest is Harvest.TRAJECTORY else 4
    advantage = dict(companion_fields(PRESETS[preset])).get("trainer.algorithm.advantage", "grpo")
    config = RunConfig.model_validate(
        {
            "name": "simulated",
            "folder": "runs/simulated",
            "model": {"path": "model"},
            "data": {"max_prompt_tokens": 50},
            "rollout": {"max_new_tokens": 1500, **(rollout or {})},
            "schedule": {"preset": preset, "groups_per_batch": groups, "group_size": 4, **schedule},
            "generator": {"replicas": 4, "slots": SLOTS, **(generator or {})},
            "trainer": {"train_steps": steps, "algorithm": {"advantage": advantage}},
        }
    )
    rules = Schedule.from_config(config)
    return MeshSettings(
        schedule=rules,
        limits=run_limits(config),
        fleet=FleetSettings(
            count=config.generator.replicas,
            slots=config.generator.slots,
            cache_tokens=cache_tokens,
            costs=COSTS,
            fetch_seconds=0.5,
            swap_seconds=0.2,
            on_new_version=config.generator.on_new_version,
            rules=ReloadRules.from_config(config),
            placement=Placement(config.rollout.placement),
        ),
        prompts=SimulatedPrompts(
            lengths=LengthModel(marginal=Lognormal(median=300, sigma=0.9), prompt_share=0.5, cap=1500, seed=seed),
            solver=SolveModel(seed=seed),
            count=60,
            prompt_tokens=40,
            groups_per_batch=rules.groups_per_batch,
            repeats=rules.prompt_repeats,
        ),
        trainer=TrainerModel(
            fixed_seconds=1.0,
            seconds_per_token=2e-4,
            publication_seconds=0.5,
            colocated=colocated,
            switch_seconds=0.3 if colocated else 0.0,
        ),
        rewards=RewardModel(median_seconds=0.3, sigma=0.5, worker_count=4, seed=seed),
        partial_save_tokens=config.rollout.partial_save_tokens,
        devices=8,
        failures=parse_items("--fail", FailurePlan, failures),
        failure_seed=seed,
    )


def run(settings: MeshSettings):
    """Run with every invariant checked; returns the mesh and its result."""
    mesh = SimulatedMesh(settings, check=True)
    return mesh, mesh.run()


def assert_conserved(mesh, result):
    """Every token is trained, in flight, or wasted for a stated reason."""
    generated = mesh.fleet.work().decoded_tokens
    trained = sum(update.tokens for update in result.updates)
    assert generated == trained + result.in_flight_tokens + sum(result.wasted_tokens.values())
