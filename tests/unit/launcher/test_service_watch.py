from collections.abc import Mapping
from pathlib import Path

from rollmesh.launcher.console_notes import ServiceWatch
from rollmesh.runtime.endpoints import AdminClient, ServiceStates


def notes(folder: Path, *polls: Mapping[str, str]) -> list[str]:
    """The lines of polls that find these waits."""
    states, lines = ServiceStates(folder, AdminClient()), list[str]()
    watch = ServiceWatch(states, lines.append)
    for waits in polls:
        states.waits = waits
        watch.note_new()
    return lines


def test_a_reason_is_noted_once_however_many_services_and_seconds_it_has(tmp_path: Path) -> None:
    late = "Redis: no answer within {} s"
    one, two = {"trainer-0": late.format(2)}, {"rollout-0": late.format(2), "trainer-0": late.format(15)}
    assert notes(tmp_path, one, one, two, two, one, two) == ["waiting: trainer-0: Redis: no answer within 2 s"]


def test_another_reason_and_one_that_returns_are_noted(tmp_path: Path) -> None:
    full, late = {"trainer-0": "disk full"}, {"rollout-0": "Redis: late"}
    both = "waiting: trainer-0: disk full; rollout-0: Redis: late"
    assert notes(tmp_path, full, full, full | late, full | late) == ["waiting: trainer-0: disk full", both]
    assert notes(tmp_path, full, full, {}, full, full) == ["waiting: trainer-0: disk full"] * 2


def test_a_reason_of_one_poll_is_not_noted(tmp_path: Path) -> None:
    assert notes(tmp_path, {"trainer-0": "disk full"}, {}, {"trainer-0": "disk full"}) == []
