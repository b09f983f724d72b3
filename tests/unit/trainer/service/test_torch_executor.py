"""A long step is no stall."""

from __future__ import annotations

import threading

from rollmesh.runtime.health import Health
from rollmesh.trainer.service.ranks import TorchExecutor


def test_a_loop_is_alive_while_torch_computes_however_long_and_stalls_an_hour_after_it() -> None:
    now = 0.0
    health, end = Health(clock=lambda: now), threading.Event()
    with TorchExecutor() as executor:
        health.watch("train", 3600.0, executor.busy)
        step = executor.submit(end.wait)
        now = 7200.0
        assert health.stalled() == {}
        end.set()
        step.result(60)
        executor.submit(lambda: None).result(60)
    assert not executor.busy()
    now = 10_801.0
    assert health.stalled() == {"train": 3601.0}
