"""Sampler domain_mix: the shares of the domains among completed trajectories follow targets (Apriel)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rollmesh.curriculum.sampler_protocol import Draw, History, PromptTable
from rollmesh.curriculum.samplers.weighted_rows import draw_uniformly
from rollmesh.errors import DataError

_SMALLEST_FACTOR, _LARGEST_FACTOR = 0.1, 10.0


def domain_mix(
    draw: Draw,
    prompts: PromptTable,
    history: History,
    train_step: int,
    *,
    targets: Mapping[str, float],
    least_completed: int,
) -> int:
    """Draw a domain by its weight, then one of its rows that were drawn least often.

    Without ``targets`` the weights of the mixture are the targets. Raises DataError for targets that do not name
    domains of the data.
    """
    goals = targets or prompts.weights
    _check(goals, prompts)
    completed = {name: history.domains[name].members if name in history.domains else 0 for name in goals}
    weights = domain_weights(goals, completed, least_completed)
    rows = np.flatnonzero(prompts.domain_of == prompts.domains.index(_domain(draw.uniform("domain"), weights)))
    drawn = history.groups[rows] + history.in_progress[rows]
    return draw_uniformly(draw, rows[prompts.endless[rows] | (drawn == drawn.min())])


def domain_weights(
    targets: Mapping[str, float], completed: Mapping[str, int], least_completed: int
) -> dict[str, float]:
    """Return the probability of every domain: ``target * clamp(target / share, 0.1, 10)``, normalised.

    ``share`` is that among the completed trajectories. Before ``least_completed`` of them the probabilities are the
    targets.
    """
    total = sum(completed[name] for name in targets)
    if total < least_completed:
        return dict(targets)
    weights = {}
    for name, target in targets.items():
        share = completed[name] / total if total else 0.0
        factor = target / share if share else _LARGEST_FACTOR
        weights[name] = target * min(_LARGEST_FACTOR, max(_SMALLEST_FACTOR, factor))
    norm = sum(weights.values())
    return {name: weight / norm for name, weight in weights.items()}


def _domain(uniform: float, weights: Mapping[str, float]) -> str:
    names = [name for name, weight in weights.items() if weight > 0]
    left = uniform * sum(weights.values())
    for name in names:
        left -= weights[name]
        if left < 0:
            return name
    return names[-1]


def _check(targets: Mapping[str, float], prompts: PromptTable) -> None:
    known = ", ".join(prompts.domains)
    if prompts.domains == ("",):
        raise DataError(
            "curriculum.sampler=domain_mix needs domains: set data.domain_field, or use data.source.type=mixture"
        )
    if not targets:
        raise DataError(f"curriculum.sampler_options.targets: name a share for every domain of the data: {known}")
    if absent := next((name for name in targets if name not in prompts.domains), None):
        raise DataError(f"curriculum.sampler_options.targets.{absent}: no row has this domain; the data has {known}")
    if missing := next((name for name in prompts.domains if name not in targets), None):
        raise DataError(f"curriculum.sampler_options.targets: {missing} is a domain of the data and has no target")
