"""Random workers, leader and trainer against a real server, compared with the plain model after every step."""

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from rollmesh.mesh import ResumeOrder
from rollmesh.store import EmbeddedServer

from .queue_machine import QueueMachine
from .queue_walk import walk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a walk is half a minute of one core, and cores may be busy

WALK = {
    0.4: "roll_back",
    1: "set_pool evict change_leader publish restart fork lose_the_last_upload lose_worker redis_restarts",
    2: "recall report_waiting open_worker fail take_over_scoring stall wake let_time_pass redis_forgets",
    3: "extend whole_step release lease_beyond_a_full_pool",
    4: "admit begin_again cut complete rest",
    5: "close",
    6: "claim train lease",
    10: "append finish",
    16: "score",
}


@pytest.mark.parametrize("resume", [ResumeOrder.NEAREST_END, ResumeOrder.MOST_TOKENS])
def test_a_long_walk_through_the_state_graph_agrees_with_the_model(server: EmbeddedServer, resume: ResumeOrder) -> None:
    QueueMachine.url = server.url
    machine = QueueMachine()
    machine.begin(filtering=True, pool=6, most_members=0, resume=resume)
    try:
        walk(machine, random.Random(1), 1500, WALK)
        reached = Counter(machine.model.ended.values())
        ends = {"consumed", "straggler", "filtered_all_right", "too_few_scored", "rolled_back"}
        assert ends <= reached.keys(), reached
        assert reached["consumed"] >= 8, reached
        assert machine.model.dropped_tokens["surplus"] > 0
        assert min(machine.registered[True], machine.registered[False]) >= 5, machine.registered
        assert min(machine.decided[kind] for kind in ("extended", "none", "rewards", "kept")) >= 3, machine.decided
        assert machine.rested >= 5, machine.rested
        assert machine.beyond_pool >= 5, machine.beyond_pool
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
