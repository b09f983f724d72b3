"""Console notes: addresses, what services wait for, and a run that learns nothing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollmesh.checkpoints.sealing import api_token
from rollmesh.launcher.console_notes import AddressNotes, RewardNotes, ServiceWatch
from rollmesh.launcher.supervisor import Supervisor
from rollmesh.runtime.endpoints import AdminClient, Endpoint, ServiceStates, published_endpoint

from ...kit.run_files import made_run

URL = "http://127.0.0.1:1/"
OWN = "a-token-of-ours"


@pytest.mark.parametrize("own", [None, OWN], ids=["generated", "own"])
async def test_only_a_generated_token_is_in_the_link_of_the_page(tmp_path: Path, own: str | None) -> None:
    """A token of the operator's own may open more than this run, and consoles are kept in logs."""
    config = made_run(tmp_path, gateway={"token": own})
    token = api_token(config)
    notes: list[str] = []
    with published_endpoint(tmp_path, Endpoint(service="gateway", index=0, grpc="", admin="", url=URL)):
        AddressNotes(config, tmp_path, Supervisor(0), notes.append).update()
    assert notes == [f"the run as a page: {URL}" + ("" if own else f"?token={token}")]


def waits(folder: Path, *polls: Mapping[str, str]) -> list[str]:
    """The lines of polls that find these waits."""
    states, lines = ServiceStates(folder, AdminClient()), list[str]()
    watch = ServiceWatch(states, lines.append)
    for waits in polls:
        states.waits = waits
        watch.note_new()
    return lines


def test_a_reason_of_two_polls_is_noted_once_however_many_services_and_seconds_it_has(tmp_path: Path) -> None:
    late = "Redis: no answer within {} s"
    one, two = {"trainer-0": late.format(2)}, {"rollout-0": late.format(2), "trainer-0": late.format(15)}
    assert waits(tmp_path, one, one, two, two, one, two) == ["waiting: trainer-0: Redis: no answer within 2 s"]
    full, late = {"trainer-0": "disk full"}, {"rollout-0": "Redis: late"}
    both = "waiting: trainer-0: disk full; rollout-0: Redis: late"
    assert waits(tmp_path, full, full, full | late, full | late) == ["waiting: trainer-0: disk full", both]
    assert waits(tmp_path, full, full, {}, full, full) == ["waiting: trainer-0: disk full"] * 2
    assert waits(tmp_path, full, {}, full) == []


def notes(reports: Sequence[dict[str, Any]], train_steps: int = 40) -> list[str]:
    reader = RewardNotes(train_steps)
    return [note for report in reports for note in reader.read(report)]


def report(reward: float, truncated: float) -> dict[str, Any]:
    return {"reward_mean": reward, "batch": {"truncated_share": truncated}}


def test_a_reward_that_stays_zero_is_noted_once_after_five_steps_or_at_the_last_one() -> None:
    assert notes([report(0.0, 0.2)] * 4) == []
    (note,) = notes([report(0.0, 0.2)] * 12)
    assert "the reward was 0 in each of the first 5 train steps" in note and "verifier" in note
    (note,) = notes([report(0.0, 0.2)] * 2, train_steps=2)
    assert "first 2 train steps" in note


def test_a_reward_that_has_ever_left_zero_is_not_noted() -> None:
    assert notes([report(0.0, 0.2), report(0.1, 0.2), *[report(0.0, 0.2)] * 8]) == []
    assert notes([report(-1.0, 0.2)] * 9) == [], "a penalty is a reward"


def test_answers_that_are_all_cut_off_are_noted() -> None:
    (note,) = notes([report(0.5, 1.0)] * 9)
    assert "every answer of the first 5 train steps was cut off at rollout.max_new_tokens" in note
    assert notes([report(0.5, 1.0)] * 4 + [report(0.5, 0.99)] * 5) == []


def test_groups_with_equal_rewards_are_noted_once_long_before_they_end_the_run() -> None:
    reader = RewardNotes(40)
    found = [note for count in (5, 19, 20, 40, 3, 25) for note in reader.equal(count)]
    assert len(found) == 1 and "20 groups in a row had equal rewards" in found[0]
