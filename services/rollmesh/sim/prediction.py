"""Prediction for a run file in one sentence, for ``rollmesh config validate --simulate``."""

from __future__ import annotations

from rollmesh.config import RunConfig
from rollmesh.sim.assumptions import assumptions
from rollmesh.sim.figures import figures
from rollmesh.sim.simulated_mesh import SimulatedMesh
from rollmesh.sim.simulation_setup import SimulationSetup, mesh_settings

_MOST_STEPS = 20


def prediction(config: RunConfig, setup: SimulationSetup) -> str:
    """Simulate the first train steps, at most 20, and return the figures with the settings that they assume.

    Raises ConfigError as ``mesh_settings`` and the simulation do.
    """
    steps = min(config.trainer.train_steps, _MOST_STEPS)
    trainer = config.trainer.model_copy(update={"train_steps": steps})
    settings = mesh_settings(config.model_copy(update={"trainer": trainer}), setup)
    found = figures(SimulatedMesh(settings).run(), settings.devices)
    return (
        f"simulated, {steps} train steps: {found.updates_per_second:.3g} updates/s, staleness "
        f"{found.mean_staleness:.2f} (at most {max(found.staleness, default=0)}), the trainer waits "
        f"{found.trainer_wait_share:.0%} of the time; assumed: "
        f"{', '.join(f'{name}={value}' for name, value in assumptions(config, setup, settings).items())}"
    )
