"""Prediction for a run file in one sentence, for ``rollmesh config validate --simulate``."""

from __future__ import annotations

from dataclasses import asdict

from rollmesh.config import RunConfig
from rollmesh.config.recipes import resolve_model
from rollmesh.sim.figures import figures
from rollmesh.sim.roofline import Efficiencies
from rollmesh.sim.simulated_mesh import SimulatedMesh
from rollmesh.sim.simulation_setup import SimulationSetup, mesh_settings

_MOST_STEPS = 20


def prediction(config: RunConfig, setup: SimulationSetup) -> str:
    """Simulate the first train steps, at most 20, and return the figures with the settings that they assume.

    The model is that of the run file, unless the setup gives one. Raises ConfigError as ``mesh_settings`` and the
    simulation do.
    """
    if "model" not in setup.model_fields_set:
        setup = setup.model_copy(update={"model": str(resolve_model(config.model.path))})
    steps = min(config.trainer.train_steps, _MOST_STEPS)
    trainer = config.trainer.model_copy(update={"train_steps": steps})
    settings = mesh_settings(config.model_copy(update={"trainer": trainer}), setup)
    found = figures(SimulatedMesh(settings).run(), settings.devices)
    assumed = setup.model_dump(exclude_none=True) | asdict(Efficiencies())
    return (
        f"simulated, {steps} train steps: {found.updates_per_second:.3g} updates/s, staleness "
        f"{found.mean_staleness:.2f} (at most {max(found.staleness, default=0)}), the trainer waits "
        f"{found.trainer_wait_share:.0%} of the time; assumed: "
        f"{', '.join(f'{name}={value}' for name, value in assumed.items())}"
    )
