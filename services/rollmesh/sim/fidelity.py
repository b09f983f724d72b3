"""Predictions of published speed-ups, and their errors beside those of a predictor that knows the other rows only."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rollmesh.errors import ConfigError
from rollmesh.sim.fidelity_setup import Assumptions, arm_settings
from rollmesh.sim.figures import Figures, figures
from rollmesh.sim.published_speed_ups import PublishedSpeedUp, Quantity
from rollmesh.sim.simulated_mesh import MeshSettings, SimulatedMesh

ORDERED_SYSTEMS = ("RollPacker", "verl staleness")
"""Systems whose rows differ in one respect, so that their order is predicted."""
_TIE = 0.01
"""Largest relative difference of two published speed-ups that counts as none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A published row beside its predictions."""

    published: PublishedSpeedUp
    simulated: float
    leave_one_out: float
    """Geometric mean of the published speed-ups of the other rows of the bar; of all others for a further row."""

    @property
    def error(self) -> float:
        """Return the absolute value of ln(simulated / published)."""
        return log_error(self.simulated, self.published.speed_up)

    @property
    def leave_one_out_error(self) -> float:
        """Return the same for the other predictor."""
        return log_error(self.leave_one_out, self.published.speed_up)


def predictions(
    rows: Sequence[PublishedSpeedUp],
    assumptions: Assumptions | None = None,
    *,
    on_arm: Callable[[str], None] = lambda name: None,
) -> list[Prediction]:
    """Simulate method and baseline of every row with a set-up; ``on_arm`` is called before each simulation.

    Raises ConfigError for fewer than two such rows.
    """
    used, simulator = assumptions or Assumptions(), _Simulator(on_arm)
    known = [row for row in rows if row.setup is not None]
    in_bar = [row for row in known if row.is_in_bar]
    means = {
        row.name: mean
        for group in (known, in_bar)
        for row, mean in zip(group, leave_one_out([row.speed_up for row in group]), strict=True)
    }
    return [
        Prediction(published=row, simulated=simulator.speed_up(row, used), leave_one_out=means[row.name])
        for row in known
    ]


class _Simulator:
    """Simulations by their settings: rows with the same set-up share one."""

    def __init__(self, on_arm: Callable[[str], None]) -> None:
        self._on_arm = on_arm
        self._known: list[tuple[MeshSettings, Figures]] = []

    def speed_up(self, row: PublishedSpeedUp, assumptions: Assumptions) -> float:
        if row.setup is None:
            raise ConfigError(f"{row.name}: no set-up is known, so nothing is predicted")
        method, baseline = (
            _rate(row.quantity, self._figures(f"{row.name}: {name}", arm_settings(row.setup, arm, assumptions)))
            for name, arm in (("method", row.setup.method), ("baseline", row.setup.baseline))
        )
        return method / baseline

    def _figures(self, name: str, settings: MeshSettings) -> Figures:
        for known, found in self._known:
            if known == settings:
                return found
        self._on_arm(name)
        found = figures(SimulatedMesh(settings).run(), settings.devices)
        self._known.append((settings, found))
        return found


def _rate(quantity: Quantity, found: Figures) -> float:
    if quantity is Quantity.TIME:
        return found.updates_per_hour
    return found.trained_tokens_per_second / found.trainer_wait_share


def leave_one_out(speed_ups: Sequence[float]) -> list[float]:
    """Predict each value as the geometric mean of the others. Raises ConfigError for fewer than two."""
    if len(speed_ups) < 2:
        raise ConfigError(f"leave_one_out: {len(speed_ups)} rows; it needs at least 2")
    logs = [math.log(value) for value in speed_ups]
    total = sum(logs)
    return [math.exp((total - own) / (len(logs) - 1)) for own in logs]


def log_error(predicted: float, published: float) -> float:
    """Return the absolute value of ln(predicted / published)."""
    return abs(math.log(predicted / published))


def ordered_pairs(found: Sequence[Prediction], system: str) -> Iterator[tuple[Prediction, Prediction, bool]]:
    """Yield the pairs of a system whose published speed-ups differ, and whether the simulated order is the same."""
    of_system = [each for each in found if each.published.system == system]
    for one, other in itertools.combinations(of_system, 2):
        low, high = sorted((one, other), key=lambda each: each.published.speed_up)
        if high.published.speed_up > low.published.speed_up * (1 + _TIE):
            yield low, high, low.simulated < high.simulated
