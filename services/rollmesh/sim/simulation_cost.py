"""Cost of a simulation on this machine, for ``rollmesh sim --scale``."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from rollmesh.sim.arms import Arm
from rollmesh.sim.figures import Figures, figures
from rollmesh.sim.run_timeline import RunTimeline
from rollmesh.sim.simulated_mesh import SimulatedMesh


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationCost:
    """Time and memory of one simulation; they differ from one run to the next."""

    processor_seconds: float
    """Processor time; the simulator has one thread."""
    peak_bytes: int
    """Largest resident memory of the process so far."""
    event_count: int
    finished: int
    """Finished trajectories."""

    @property
    def microseconds_per_trajectory(self) -> float:
        """Processor time per finished trajectory."""
        return 1e6 * self.processor_seconds / max(1, self.finished)

    def document(self) -> dict[str, Any]:
        """Return the cost for JSON."""
        return {**asdict(self), "microseconds_per_trajectory": self.microseconds_per_trajectory}

    def sentence(self) -> str:
        """Return the cost in words."""
        return (
            f"simulated in {self.processor_seconds:.1f} s of one core and {self.peak_bytes / 1e9:.2f} GB: "
            f"{self.event_count:,} events, {self.finished:,} finished trajectories, "
            f"{self.microseconds_per_trajectory:.0f} microseconds each"
        )


def simulate_at_cost(
    arm: Arm, *, check: bool = False, timeline: RunTimeline | None = None
) -> tuple[Figures, SimulationCost]:
    """Simulate one arm, and measure the simulation itself; ``timeline`` takes samples for plots."""
    began = time.process_time()
    run = SimulatedMesh(arm.settings, check=check, timeline=timeline).run()
    seconds = time.process_time() - began
    # Linux counts kibibytes, macOS bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    cost = SimulationCost(
        processor_seconds=seconds,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        event_count=run.event_count,
        finished=run.finished,
    )
    return figures(run, arm.settings.devices), cost
