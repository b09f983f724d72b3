"""Predictions of published speed-ups, and their errors beside those of a predictor that knows the other rows only.

What no source states is assumed once for all rows. Two constants follow from a row by a rule: a generator has the
fewest GPUs, a power of 2, on which the weights take at most half of the memory. Lengths are those of a public trace of
the same kind of model: that of a reasoning model knows longer responses than any row allows, and is cut at the row's
cap; that of a base model ends at half of its own cap, and is scaled by the row's cap over its own.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from benchmarks.published.speed_ups import PublishedArm, PublishedSetup, PublishedSpeedUp, Quantity
from rollmesh.config import load_run_config
from rollmesh.errors import ConfigError
from rollmesh.scheduling.presets import PRESETS, companion_settings
from rollmesh.sim.figures import Figures, figures
from rollmesh.sim.roofline import WEIGHT_BYTES, find_gpu, find_model, weight_count
from rollmesh.sim.simulated_mesh import MeshSettings, SimulatedMesh
from rollmesh.sim.simulation_setup import DEFAULT_RUN, SimulationSetup, mesh_settings, parse_items

ORDERED_SYSTEMS = ("RollPacker", "verl staleness")
"""Systems whose rows differ in one respect, so that their order is predicted."""
_TIE = 0.01
"""Largest relative difference of two published speed-ups that counts as none."""
_WITH_OWN_PASS = ("recompute", "current")
"""Old logprobs for which the published systems make a pass, also with one minibatch, where ours needs none."""
_WEIGHT_SHARE = 0.5
GPU = "H800"
"""Where a source names no GPU: AReaL, RollPacker and RollArt have it, APRIL H100, verl H20."""
_PROMPT_TOKENS = 256
"""Between the mean prompts of the public traces: 161 (math) and 485 (code)."""
_SLOTS = 256
"""Calls of a generator at the same time: the default of vLLM."""
_TRAIN_STEPS = 20
_ACCEPTANCE = 0.7
"""Chance that a draft token is accepted if those before it are: no source has it by position."""
_TIMES = ("switch_seconds", "step_fixed_seconds", "storage_bytes_per_second", "swap_seconds", "reward_seconds")


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
    times: Mapping[str, float] = MappingProxyType({}),
    *,
    on_arm: Callable[[str], None] = lambda name: None,
) -> list[Prediction]:
    """Simulate method and baseline of every row with a set-up; ``on_arm`` is called before each simulation.

    Raises ConfigError for fewer than two such rows.
    """
    simulator = _Simulator(on_arm)
    known = [row for row in rows if row.setup is not None]
    in_bar = [row for row in known if row.is_in_bar]
    means = {
        row.name: mean
        for group in (known, in_bar)
        for row, mean in zip(group, leave_one_out([row.speed_up for row in group]), strict=True)
    }
    return [
        Prediction(published=row, simulated=simulator.speed_up(row, times), leave_one_out=means[row.name])
        for row in known
    ]


class _Simulator:
    """Simulations by their settings: rows with the same set-up share one."""

    def __init__(self, on_arm: Callable[[str], None]) -> None:
        self._on_arm = on_arm
        self._known: list[tuple[MeshSettings, Figures]] = []

    def speed_up(self, row: PublishedSpeedUp, times: Mapping[str, float]) -> float:
        if row.setup is None:
            raise ConfigError(f"{row.name}: no set-up is known, so nothing is predicted")

        def rate(name: str, setup: PublishedSetup, arm: PublishedArm) -> float:
            found = self._figures(f"{row.name}: {name}", arm_settings(setup, arm, times))
            is_time = row.quantity is Quantity.TIME
            return found.updates_per_hour if is_time else found.trained_tokens_per_second / found.trainer_wait_share

        return rate("method", row.setup, row.setup.method) / rate("baseline", row.setup, row.setup.baseline)

    def _figures(self, name: str, settings: MeshSettings) -> Figures:
        for known, found in self._known:
            if known == settings:
                return found
        self._on_arm(name)
        found = figures(SimulatedMesh(settings).run(), settings.devices)
        self._known.append((settings, found))
        return found


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


def times_of(settings: Sequence[str]) -> Mapping[str, float]:
    """Return other times of all rows, and the seed, from ``name=value``. Raises ConfigError for another name or value.

    They are fields of ``SimulationSetup``.
    """
    for item in settings:
        if item.partition("=")[0] not in ("seed", *_TIMES):
            raise ConfigError(f"--with {item}: the command takes seed, {', '.join(_TIMES)}, for all rows")
    setup = parse_items("--with", SimulationSetup, settings)
    return {name: getattr(setup, name) for name in setup.model_fields_set}


def arm_settings(
    setup: PublishedSetup, arm: PublishedArm, times: Mapping[str, float] = MappingProxyType({})
) -> MeshSettings:
    """Return the simulation of the method or of the baseline of a row."""
    gpu, groups, devices = setup.gpu or GPU, setup.groups_per_batch, 1
    weights = WEIGHT_BYTES * weight_count(find_model(setup.model))
    while weights > _WEIGHT_SHARE * devices * find_gpu(gpu).memory_bytes:
        devices *= 2
    overrides = [
        *companion_settings(PRESETS[arm.preset]),
        f"schedule.preset={arm.preset}",
        f"schedule.groups_per_batch={groups}",
        f"schedule.group_size={setup.group_size}",
        f"trainer.minibatches={setup.optimizer_steps}",
        f"trainer.train_steps={_TRAIN_STEPS}",
        f"data.max_prompt_tokens={_PROMPT_TOKENS}",
        f"rollout.max_new_tokens={setup.response_tokens}",
        f"generator.max_context_tokens={_PROMPT_TOKENS + setup.response_tokens}",
        f"generator.replicas={arm.generator_gpus // devices}",
        f"generator.slots={_SLOTS}",
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
        "lengths": f"dapo-32b:cap={setup.response_tokens}" if setup.is_base else "intern-s1-math",
        "prompt_tokens": _PROMPT_TOKENS,
        "reward_workers": groups * setup.group_size,
        "drafts": f"{arm.drafts}:acceptance={_ACCEPTANCE}" if arm.drafts else None,
        **times,
    }
    config = load_run_config(DEFAULT_RUN, overrides)
    settings = mesh_settings(config, SimulationSetup.model_validate(values))
    if config.trainer.algorithm.old_logprobs not in _WITH_OWN_PASS:
        return settings
    return replace(settings, trainer=replace(settings.trainer, evidence_passes=1))
