"""Step reports in the queue: whose they are, what takes the place of what, and how many stay."""

from __future__ import annotations

from typing import Any

import pytest

from rollmesh.errors import SessionLost
from rollmesh.store import KEPT_REPORTS, TrajectoryStore

from .store_mesh import Mesh


def reports(*steps: int, attempt: int = 0) -> list[dict[str, Any]]:
    return [{"train_step": step, "attempt": attempt, "batch": {"outcome_mean": 0.1 + step}} for step in steps]


async def test_reports_come_back_as_they_were_written_from_any_step_on(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    assert await store.step_reports.read(0, 10) == []
    for step in range(1, 13):
        await store.step_reports.write(mesh.trainer, step - 1, reports(step))
    assert await store.step_reports.read(0, 99) == reports(*range(1, 13))
    assert await store.step_reports.read(9, 3) == reports(9, 10, 11)
    assert await store.step_reports.read(13, 3) == []


async def test_a_step_that_is_trained_again_takes_the_place_of_itself_and_all_later_ones(
    store: TrajectoryStore,
) -> None:
    mesh = await Mesh.start(store)
    await store.step_reports.write(mesh.trainer, 0, reports(1, 2, 3, 4, 5))
    for _ in range(2):
        await store.step_reports.write(mesh.trainer, 2, reports(3, attempt=1))
        assert await store.step_reports.read(0, 99) == reports(1, 2) + reports(3, attempt=1)
    await store.step_reports.write(mesh.trainer, 1)
    assert await store.step_reports.read(0, 99) == reports(1)
    await store.step_reports.write(mesh.trainer, 0)
    assert await store.step_reports.read(0, 99) == []


async def test_the_newest_reports_stay(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    # In several calls, and repeated, as a trainer does whose Redis lost them.
    for _ in range(2):
        await store.step_reports.write(mesh.trainer, 0, reports(*range(1, KEPT_REPORTS + 11)))
    found = await store.step_reports.read(0, 2 * KEPT_REPORTS)
    assert [report["train_step"] for report in found] == list(range(11, KEPT_REPORTS + 11))
    await store.step_reports.write(mesh.trainer, KEPT_REPORTS + 10, reports(KEPT_REPORTS + 11))
    found = await store.step_reports.read(0, 2 * KEPT_REPORTS)
    assert [report["train_step"] for report in found] == list(range(12, KEPT_REPORTS + 12))


async def test_a_trainer_that_was_replaced_reports_nothing(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await store.step_reports.write(mesh.trainer, 0, reports(1, 2))
    second = await store.training.open_session("second")
    for records in (reports(2, attempt=1), []):
        with pytest.raises(SessionLost):
            await store.step_reports.write(mesh.trainer, 1, records)
    assert await store.step_reports.read(0, 99) == reports(1, 2)
    await store.step_reports.write(second, 1, reports(2, attempt=2))
    assert await store.step_reports.read(0, 99) == reports(1) + reports(2, attempt=2)
