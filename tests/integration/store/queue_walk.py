"""Random steps of a queue machine, weighted by their names."""

import inspect
import random
from collections.abc import Callable, Mapping
from typing import Any

from hypothesis.stateful import RULE_MARKER

from rollmesh.store import ReleaseReason

from .queue_machine import FORGOTTEN, QueueMachine

DRAWS: dict[str, Callable[[random.Random], Any]] = {
    "pick": lambda rng: rng.randrange(1000),
    "count": lambda rng: rng.randint(1, 3),
    "more": lambda rng: rng.randint(1, 3),
    "needed": lambda rng: rng.randint(2, 3),
    "spare": lambda rng: rng.choice([0, 1, 2]),
    "rank": lambda rng: rng.randrange(128),
    "rounds": lambda rng: rng.random() < 0.5,
    "shape": lambda rng: rng.choice(["none", "rewards", "kept"]),
    "pool": lambda rng: rng.randint(2, 8),
    "paused": lambda rng: rng.random() < 0.2,
    "most_waiting": lambda rng: rng.randint(0, 3),
    "waiting": lambda rng: rng.randint(0, 3),
    "aside": lambda rng: rng.random() < 0.4,
    "limit": lambda rng: rng.randint(1, 4),
    "tokens": lambda rng: rng.randint(1, 5),
    "age": lambda rng: rng.randint(0, 3),
    "reward": lambda rng: rng.choice([0.0, 1.0, 0.25, 0.5, 0.75, None]),
    "top_k": lambda rng: rng.choice([None, 0, 2]),
    "rewards": lambda rng: rng.choices([0.0, 1.0, 0.25, 0.5, 0.75, None], k=5),
    "reason": lambda rng: rng.choice(list(ReleaseReason)),
    "ends": lambda rng: rng.random() < 0.5,
    "dies": lambda rng: rng.random() < 0.6,
    "hours": lambda rng: rng.randint(1, 5),
    "rolled_back": lambda rng: rng.random() < 0.2,
    "steps": lambda rng: rng.choices(FORGOTTEN, k=rng.randint(0, 6)),
}
"""Values of the arguments of a step, by name."""


def walk(
    machine: QueueMachine,
    rng: random.Random,
    steps: int,
    weights: Mapping[float, str],
    draws: Mapping[str, Callable[[random.Random], Any]] = DRAWS,
) -> None:
    """Take random steps whose preconditions hold, and compare with the model after each; names by their weight."""
    machine.agree()  # The model takes the time from the server.
    by_name = {name: weight for weight, names in weights.items() for name in names.split()}
    for _ in range(steps):
        (name,) = rng.choices(list(by_name), weights=list(by_name.values()))
        step = getattr(machine, name)
        rule = getattr(step, RULE_MARKER, None)
        if rule is None or all(holds(machine) for holds in rule.preconditions):
            step(**{argument: draws[argument](rng) for argument in inspect.signature(step).parameters})
            machine.agree()
