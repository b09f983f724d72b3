"""The life of a version is read from the logs of trainers and generators, and drawn on the page."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from rollmesh.report.recorded_run import RecordedRun
from rollmesh.report.versions import VersionLife, version_lives
from rollmesh.report.view.recorded_curves import recorded_curves


def write_log(folder: Path, name: str, *events: tuple[str, int | None, float], **fields: Any) -> None:
    """Append these events (name, policy version, seconds) with the fields to a log, and lines that are none."""
    lines = [json.dumps({"event": "other", "timestamp": at(0.0)}), "not JSON"]
    for event, version, seconds in events:
        lines.append(json.dumps({"event": event, "policy_version": version, "timestamp": at(seconds)} | fields))
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    with (folder / "logs" / name).open("a") as log:
        log.write("\n".join(lines) + "\n")


def at(seconds: float) -> str:
    return datetime.fromtimestamp(1_700_000_000 + seconds, UTC).isoformat()


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    write_log(
        tmp_path,
        "trainer-0.log",
        ("policy_announced", 0, 1.0),
        ("step_trained", 1, 10.0),
        ("policy_announced", 1, 12.0),
        ("step_trained", 2, 20.0),
        ("step_trained", 2, 25.0),
        ("policy_announced", 2, 26.0),
        ("step_trained", 3, 30.0),
        ("step_trained", None, 40.0),
    )
    write_log(tmp_path, "generator-0.log", ("policy_in_service", 0, 2.0), ("policy_in_service", 1, 15.0))
    write_log(tmp_path, "generator-1.log", ("policy_in_service", 1, 13.5))
    write_log(tmp_path, "reward-0.log", ("policy_in_service", 1, 99.0))
    return RecordedRun(tmp_path)


def test_a_life_begins_with_the_newest_copy_and_ends_with_the_last_generator(run: RecordedRun) -> None:
    assert version_lives(run.logs()) == (
        VersionLife(policy_version=1, announced=2.0, first_served=3.5, last_served=5.0),
        VersionLife(policy_version=2, announced=1.0, first_served=None, last_served=None),
    )


@pytest.mark.parametrize("at_start", [{"at_start": True}, {}])
def test_a_generator_that_starts_again_or_goes_back_by_a_pin_is_not_late(
    run: RecordedRun, at_start: dict[str, bool]
) -> None:
    before = version_lives(run.logs())
    write_log(run.path, "generator-0.log", ("policy_in_service", 1, 90_000.0), **at_start)
    write_log(run.path, "generator-2.log", ("policy_in_service", 2, 90_001.0), at_start=True)
    assert version_lives(run.logs()) == before


def test_a_version_that_the_next_trainer_announces_without_a_copy_is_left_out(run: RecordedRun) -> None:
    before = version_lives(run.logs())
    write_log(run.path, "trainer-0.log", ("trainer_takes_over", 2, 90_000.0), ("policy_announced", 3, 90_001.0))
    assert version_lives(run.logs()) == before


def test_a_version_that_a_restored_redis_gets_once_more_was_announced_before(run: RecordedRun) -> None:
    before = version_lives(run.logs())
    write_log(run.path, "trainer-0.log", ("policy_announced", 2, 90_000.0))
    assert version_lives(run.logs()) == before


def test_the_page_draws_the_lives(run: RecordedRun) -> None:
    names = [f"version_{event}" for event in ("announced", "first_served", "last_served")]
    announced, first, last = recorded_curves(run).curves.answer(names, 100).series
    assert (announced.axis, announced.x, announced.mean) == ("policy_version", [1, 2], [2.0, 1.0])
    assert (first.x, first.mean, last.mean) == ([1], [3.5], [5.0])
