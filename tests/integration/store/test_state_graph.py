"""Random workers, leader and trainer against a real server, compared with the plain model after every step."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    run_state_machine_as_test,
)

from rollmesh.mesh import ResumeOrder
from rollmesh.store import EmbeddedServer, ReleaseReason

from .queue_machine import FORGOTTEN, QueueMachine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a walk is half a minute of one core, and cores may be busy

WALK = {
    "admit": 4,
    "set_pool": 1,
    "evict": 1,
    "begin_again": 4,
    "recall": 2,
    "extend": 3,
    "close": 5,
    "cut": 4,
    "change_leader": 1,
    "publish": 1,
    "claim": 6,
    "train": 6,
    "whole_step": 3,
    "open_worker": 2,
    "lease": 6,
    "append": 10,
    "finish": 10,
    "score": 16,
    "complete": 4,
    "release": 3,
    "rest": 4,
    "fail": 2,
    "restart": 1,
    "fork": 1,
    "take_over_scoring": 2,
    "lose_worker": 1,
    "stall": 2,
    "wake": 2,
    "let_time_pass": 2,
    "redis_forgets": 2,
    "redis_restarts": 1,
    "roll_back": 1,
}


def test_a_long_walk_through_the_state_graph_agrees_with_the_model(server: EmbeddedServer) -> None:
    QueueMachine.url = server.url
    machine, rng = QueueMachine(), random.Random(5)
    arguments: dict[str, Callable[[], dict[str, Any]]] = {
        "admit": lambda: {
            "count": rng.randint(1, 3),
            "needed": rng.randint(2, 3),
            "spare": rng.choice([0, 1, 2]),
            "rank": rng.randrange(128),
            "rounds": rng.random() < 0.5,
        },
        "extend": lambda: {"pick": rng.randrange(1000), "more": rng.randint(1, 3), "spare": rng.randint(0, 1)},
        "close": lambda: {"pick": rng.randrange(1000), "shape": rng.choice(["none", "rewards", "kept"])},
        "set_pool": lambda: {"pool": rng.randint(2, 8), "paused": rng.random() < 0.2},
        "evict": lambda: {"pick": rng.randrange(1000)},
        "begin_again": lambda: {"pick": rng.randrange(1000), "aside": rng.random() < 0.4},
        "recall": lambda: {"count": rng.randint(1, 3)},
        "cut": lambda: {"count": rng.randint(1, 3)},
        "whole_step": lambda: {"count": rng.randint(1, 3)},
        "lease": lambda: {"pick": rng.randrange(1000), "limit": rng.randint(1, 4)},
        "append": lambda: {"pick": rng.randrange(1000), "tokens": rng.randint(1, 5), "age": rng.randint(0, 3)},
        "finish": lambda: {"pick": rng.randrange(1000), "tokens": rng.randint(1, 3)},
        "score": lambda: {"pick": rng.randrange(1000), "reward": rng.choice([0.0, 1.0, 0.25, 0.5, 0.75, None])},
        "complete": lambda: {"rewards": rng.choices([0.0, 1.0, 0.25, 0.5, 0.75, None], k=5)},
        "rest": lambda: {"pick": rng.randrange(1000)},
        "release": lambda: {"pick": rng.randrange(1000), "reason": rng.choice(list(ReleaseReason))},
        "take_over_scoring": lambda: {"pick": rng.randrange(1000), "limit": rng.randint(1, 3)},
        "lose_worker": lambda: {"pick": rng.randrange(1000), "dies": rng.random() < 0.6},
        "let_time_pass": lambda: {"hours": rng.randint(1, 5)},
        "publish": lambda: {"rolled_back": rng.random() < 0.2},
    }
    arguments["redis_forgets"] = lambda: {
        "pick": rng.randrange(1000),
        "steps": rng.choices(FORGOTTEN, k=rng.randint(0, 6)),
    }
    for name in ("fail", "fork", "restart", "redis_restarts", "stall", "wake"):
        arguments[name] = lambda: {"pick": rng.randrange(1000)}
    enabled = {
        "admit": lambda: machine.model.admitted_unconsumed < 8,
        "cut": lambda: machine.ready(),
        "extend": lambda: machine.model.undecided,
        "close": lambda: machine.model.undecided,
        "whole_step": lambda: machine.ready() and not machine.model.batch,
        "claim": lambda: machine.model.claim(),
        "train": lambda: machine.model.batch_is_confirmed,
        "roll_back": lambda: rng.random() < 0.4 and not machine.model.batch_is_confirmed,
    }
    machine.begin(filtering=True, pool=6, most_members=0, resume=ResumeOrder.NEAREST_END)
    try:
        for _ in range(1500):
            name = rng.choices(list(WALK), weights=list(WALK.values()))[0]
            if enabled.get(name, lambda: True)():
                getattr(machine, name)(**arguments.get(name, dict)())
                machine.agree()
        reached = Counter(machine.model.ended.values())
        assert {"consumed", "straggler", "filtered_all_right", "too_few_scored", "rolled_back"} <= reached.keys(), (
            reached
        )
        assert reached["consumed"] >= 8, reached
        assert machine.model.dropped_tokens["surplus"] > 0
        assert min(machine.registered[True], machine.registered[False]) >= 5, machine.registered
        assert min(machine.decided[kind] for kind in ("extended", "none", "rewards", "kept")) >= 3, machine.decided
        assert machine.rested >= 5, machine.rested
        assert None not in (machine.model.times.ready_updates, machine.model.times.update_seconds)
        assert min(machine.begun_again[True], machine.begun_again[False], machine.recalled) >= 3, machine.begun_again
    finally:
        machine.teardown()


def test_the_queue_follows_its_state_graph(server: EmbeddedServer) -> None:
    QueueMachine.url = server.url
    run_state_machine_as_test(
        QueueMachine,
        settings=settings(
            max_examples=60,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
