"""Prompt samplers: functions of the draw, the prompts, their history and the train step that return a row."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollmesh.config.curriculum import CurriculumConfig
from rollmesh.config.sampler_methods import ORDER, SAMPLERS
from rollmesh.curriculum.prompt_tables import Draw, History, PromptTable
from rollmesh.errors import DataError
from rollmesh.types import Float64Array, Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSampler:
    """A sampler with its options; what it returns is checked."""

    name: str
    function: Callable[[Draw, PromptTable, History, int], Any]

    def choose(self, draw: Draw, prompts: PromptTable, history: History, train_step: int) -> int:
        """Return the row of a draw. Raises DataError if the sampler fails, or names no row of the data."""
        row = self.number(draw, prompts, history, train_step)
        if not 0 <= row < prompts.row_count:
            raise DataError(
                f"curriculum.sampler={self.name} named row {row}; the data has {prompts.row_count} rows, from 0"
            )
        return row

    def number(self, draw: Draw, prompts: PromptTable, history: History, train_step: int) -> int:
        """Return the number that the sampler chooses, which may be outside the table."""
        row = self.function(draw, prompts, history, train_step)
        return int(row.__index__())


def load_sampler(config: CurriculumConfig) -> PromptSampler | None:
    """Return the sampler of a run; None for the order of the source.

    Raises ConfigError if a user's function does not exist, or cannot be called with its options.
    """
    if config.sampler == ORDER:
        return None

    def problem(row: Any, *_: object) -> str:
        is_number = hasattr(row, "__index__") and not isinstance(row, bool | np.bool_)
        return "" if is_number else f"{row!r} instead of the number of a row"

    function = SAMPLERS.bind(config.sampler, config.sampler_options, problem)
    return PromptSampler(name=config.sampler, function=function)


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
    """Draw a domain in proportion to ``target clamp(target / share, 0.1, 10)``, then one of its rows drawn least often.

    ``share`` is that among the completed trajectories. Without ``targets`` the weights of the mixture are the targets.
    Raises DataError for targets that do not name domains of the data.
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


def difficulty(
    draw: Draw,
    prompts: PromptTable,
    history: History,
    train_step: int,
    *,
    target: float,
    temperature: float,
    unseen: float,
) -> int:
    """Draw a row in proportion to ``exp(-|solve rate - target| / temperature)``."""
    return choose_row(
        draw, prompts, history, unseen, lambda rows: target_weights(solve_rates(history, rows), target, temperature)
    )


def target_weights(rates: Float64Array, target: float, temperature: float) -> Float64Array:
    """Return the probability of rows with these solve rates, float64 [rows]."""
    exponents = -np.abs(rates - target) / temperature
    weights = np.exp(exponents - exponents.max())
    probabilities: Float64Array = weights / weights.sum()
    return probabilities


def frontier(
    draw: Draw,
    prompts: PromptTable,
    history: History,
    train_step: int,
    *,
    low_share: float,
    candidates: int,
    unseen: float,
) -> int:
    """Draw one of the rows next to the boundary between the ``low_share`` with the lowest mean reward and the others.

    A row that was drawn more often than others is left out while ``candidates`` rows remain.
    """

    def weigh(rows: Int64Array) -> Float64Array:
        means = history.reward_sums[rows] / history.members[rows]
        return frontier_weights(means, history.groups[rows], low_share, candidates)

    return choose_row(draw, prompts, history, unseen, weigh)


def frontier_weights(means: Float64Array, groups: Int64Array, low_share: float, candidates: int) -> Float64Array:
    """Return 1 for the candidates and 0 for other rows: the highest of the lower part, the lowest of the upper part."""
    pool = np.flatnonzero(groups < groups.max())
    if len(pool) < candidates:
        pool = np.arange(len(means))
    order = pool[np.argsort(means[pool], kind="stable")]
    boundary = round(low_share * len(order))
    first = min(max(0, boundary - candidates // 2), max(0, len(order) - candidates))
    weights = np.zeros(len(means))
    weights[order[first : first + candidates]] = 1.0
    return weights


def band(
    draw: Draw, prompts: PromptTable, history: History, train_step: int, *, low: float, high: float, unseen: float
) -> int:
    """Draw one of the rows whose mean reward lies between two quantiles of the mean rewards, bounds included."""

    def weigh(rows: Int64Array) -> Float64Array:
        means = history.reward_sums[rows] / history.members[rows]
        bottom, top = np.quantile(means, (low, high))
        weights: Float64Array = ((means >= bottom) & (means <= top)).astype(np.float64)
        return weights

    return choose_row(draw, prompts, history, unseen, weigh)


def unsolved(draw: Draw, prompts: PromptTable, history: History, train_step: int, *, unseen: float) -> int:
    """Draw a row in proportion to ``1 - solve rate``."""
    return choose_row(draw, prompts, history, unseen, lambda rows: 1.0 - solve_rates(history, rows))


Weigh = Callable[[Int64Array], Float64Array]
"""Weights of rows that have a scored trajectory, float64 [rows]; not negative."""


def choose_row(draw: Draw, prompts: PromptTable, history: History, unseen: float, weigh: Weigh) -> int:
    """Return a row without an unfinished group: an unseen one with probability ``unseen``, else one by weight.

    An unseen row was never drawn, or has no scored trajectory and was drawn no more often than any that has one and is
    still drawn. If all rows have an unfinished group, every row may be drawn.
    """
    free = np.flatnonzero(prompts.endless | (history.in_progress == 0))
    if not len(free):
        free = np.arange(prompts.row_count)
    is_seen = history.members[free] > 0
    seen, new = free[is_seen], free[~is_seen]
    weights = weigh(seen) if len(seen) else np.zeros(0)
    if len(seen):
        # Rows whose trajectories never get a score would take the share of the unseen ones without end. A row of weight
        # 0, for example a solved one, is drawn no more, so it holds no other back.
        drawn = seen[weights > 0] if np.any(weights > 0) else seen
        new = new[history.groups[new] <= history.groups[drawn].min()]
    if len(new) and (not len(seen) or draw.uniform("unseen") < unseen):
        # Rows that were drawn without a score come after those that were never drawn.
        return draw_uniformly(draw, new[history.groups[new] == history.groups[new].min()])
    return draw_by_weight(draw, seen, weights)


def draw_uniformly(draw: Draw, rows: Int64Array) -> int:
    """Return one of the rows, each with the same probability."""
    return int(rows[int(draw.uniform("row") * len(rows))])


def draw_by_weight(draw: Draw, rows: Int64Array, weights: Float64Array) -> int:
    """Return one of the rows in proportion to its weight; uniformly if all weights are 0."""
    sums = np.cumsum(weights)
    if not sums[-1] > 0:
        return draw_uniformly(draw, rows)
    at = int(np.searchsorted(sums, draw.uniform("row") * sums[-1], side="right"))
    return int(rows[min(at, len(rows) - 1)])


def solve_rates(history: History, rows: Int64Array) -> Float64Array:
    """Return the share of solved trajectories of rows that have a scored one, float64 [rows]."""
    rates: Float64Array = history.solved[rows] / history.members[rows]
    return rates
