"""Trial of a user's methods: import the code that curriculum and trainer.algorithm name, and check how it is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rollmesh.config import RunConfig
from rollmesh.config.methods import is_own
from rollmesh.curriculum.budgets.budget_registry import load_budget
from rollmesh.curriculum.planners.planner_registry import load_planner
from rollmesh.curriculum.shapers.shaper_registry import load_shaper
from rollmesh.errors import ConfigError, RollmeshError
from rollmesh.rollout.sampler_binding import bind_sampler


def has_own_methods(config: RunConfig) -> bool:
    """Tell whether a run has a method of the user's own code."""
    return any(True for _ in _trials(config))


def try_methods(config: RunConfig) -> None:
    """Load every method of the user's own code. Raises ConfigError that names its field."""
    for field, name, load in _trials(config):
        try:
            load()
        except RollmeshError:
            raise
        except Exception as error:
            raise ConfigError(f"{field}: {name}: {type(error).__name__}: {error}") from error


def _trials(config: RunConfig) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """Yield field, name and loader of each method of the user's own code."""
    own, algorithm = config.curriculum, config.trainer.algorithm
    trials: list[tuple[str, str, Callable[[], object]]] = [
        ("curriculum.sampler", own.sampler, lambda: bind_sampler(own)),
        ("curriculum.planner", own.planner, lambda: load_planner(own.planner, own.planner_options)),
        ("curriculum.group_shaper", own.group_shaper, lambda: load_shaper(own.group_shaper, own.group_shaper_options)),
        ("curriculum.token_budget", own.token_budget, lambda: _budget(config, "token_budget")),
        ("curriculum.turn_budget", own.turn_budget, lambda: _budget(config, "turn_budget")),
        ("trainer.algorithm", algorithm.advantage, lambda: _bind_algorithm(config)),
        ("trainer.algorithm", algorithm.loss, lambda: _bind_algorithm(config)),
        *(("trainer.algorithm.masks", mask.name, lambda: _bind_algorithm(config)) for mask in algorithm.masks),
    ]
    yield from (trial for trial in trials if is_own(trial[1]))


def _budget(config: RunConfig, field: str) -> None:
    name, options = getattr(config.curriculum, field), getattr(config.curriculum, f"{field}_options")
    load_budget(field, name, options, most=config.rollout.max_new_tokens, train_steps=config.trainer.train_steps)


def _bind_algorithm(config: RunConfig) -> None:
    # It imports torch, which takes seconds.
    from rollmesh.trainer.learner.method_binding import bind_advantage, bind_loss, bind_masks

    bind_advantage(config.trainer.algorithm)
    bind_loss(config.trainer.algorithm)
    bind_masks(config.trainer.algorithm)
