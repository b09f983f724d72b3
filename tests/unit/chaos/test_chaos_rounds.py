"""A round of the chaos bench passes only if everything that was promised held, and if the fault really struck."""

from __future__ import annotations

import json
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.frame import missed
from rollmesh.config.load import validate_run_config
from rollmesh.errors import ConfigError
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.runtime.endpoints import Endpoint
from rollmesh.scheduling import Schedule
from rollmesh.scheduling.presets import PRESETS
from rollmesh.store.embedded import EmbeddedServer

from ...chaos.attack import AttackedRun, Victim
from ...chaos.chaos import _regeneration
from ...chaos.faults import FAULTS, Cost, ExpectedEnd, Fault, Outside, faults_named
from ...chaos.rounds import (
    ChaosRound,
    groups_ended_unfinished,
    read_round,
    regenerated,
    regenerated_bound,
)
from ...chaos.short_run import short_run_config
from ...kit.agent_programs import write_page_run

GOOD = ChaosRound(
    fault="kill -9 generator",
    expected_end=ExpectedEnd(),
    injected=True,
    exit_statuses=(0,),
    trainer_ends=0,
    seconds=1.0,
    lost=0,
    trained_twice=0,
    staleness_violations=0,
    green=True,
    judge_problems=(),
    in_flight=1,
    regenerated_tokens=5,
    regenerated_bound=5,
    deltas=None,
    output="",
)


DAMAGED = replace(
    GOOD,
    fault="flip a byte of a batch file, kill -9 trainer",
    expected_end=ExpectedEnd(exit_statuses=(2, 1), green=False, output_contains="cannot continue: CheckpointError"),
    exit_statuses=(2, 1),
    trainer_ends=1,
    green=False,
    judge_problems=("batch file 00000004.pb: Damaged",),
    lost=-1,
    regenerated_bound=None,
    output="error: trainer-0 cannot continue:\nCheckpointError: tampered",
)


@pytest.mark.parametrize(
    ("sound", "change"),
    [
        (GOOD, {"injected": False}),
        (GOOD, {"exit_statuses": (1,)}),
        (GOOD, {"green": False}),
        (GOOD, {"judge_problems": ("1 trajectory(s) were trained more than once: e0-1.0",)}),
        (GOOD, {"green": False, "judge_problems": ("a step is missing",)}),
        (GOOD, {"lost": 1}),
        (GOOD, {"trained_twice": -1}),
        (GOOD, {"staleness_violations": 1}),
        (GOOD, {"regenerated_tokens": 6}),
        (GOOD, {"regenerated_tokens": None}),
        (GOOD, {"deltas": 0}),
        (DAMAGED, {"injected": False}),
        (DAMAGED, {"exit_statuses": (0, 1)}),
        (DAMAGED, {"exit_statuses": (2, 0)}),
        (DAMAGED, {"green": True}),
        (DAMAGED, {"green": True, "judge_problems": ()}),
        (DAMAGED, {"judge_problems": ()}),
        (DAMAGED, {"trainer_ends": 11}),
        (DAMAGED, {"output": "error: trainer-0 ended with status 1, 21 times"}),
    ],
)
def test_a_round_fails_for_each_broken_promise_or_when_judge_and_audit_disagree(
    sound: ChaosRound, change: dict[str, Any]
) -> None:
    assert sound.passed
    assert not replace(sound, **change).passed


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_round_has_a_valid_run_file(fault: Fault, tmp_path: Path) -> None:
    base = None if fault.outside is Outside.NOTHING else write_page_run(tmp_path, tmp_path / "model")
    data = short_run_config(Path("run"), 0, fault.preset, fault.settings, base)
    if fault.in_bucket:
        data["checkpoints"] |= {"folder": "s3://bucket/round"}
    config = validate_run_config(data, "round")
    assert fault.preset == "copris" or fault.name.endswith(f", {fault.preset}")
    assert (config.model.adapter is not None) is fault.name.endswith(", adapter")
    assert fault.in_bucket is fault.name.endswith(", deltas")
    assert (config.checkpoints.anchor_every_versions > 1) is fault.in_bucket


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_can_have_a_round(preset: str) -> None:
    config = validate_run_config(short_run_config(Path("run"), 0, preset), "round")
    resolved = Schedule.from_config(config)
    assert (resolved.preset, config.schedule.max_staleness) == (preset, resolved.max_staleness)


def look(t: float, generated: dict[str, float], saved: int, *, leased: int = 0, running: int = 0) -> dict[str, Any]:
    return {
        "t": t,
        "generated_token_total": sum(generated.values()),
        "generated_tokens": generated,
        "saved_token_total": saved,
        "generators": [{"running": running, "waiting": 0}],
        "view": {"leased": leased},
    }


def written(folder: Path, looks: list[dict[str, Any]]) -> RunFolder:
    run = RunFolder(folder)
    run.timeline.write_text("".join(json.dumps(one) + "\n" for one in looks))
    return run


def test_regenerated_tokens_include_what_a_killed_generator_took_along(tmp_path: Path) -> None:
    folder = written(tmp_path, [look(1.0, {"0:7": 50.0}, 40), look(2.0, {"0:7": 60.0, "0:9": 60.0}, 118)])
    assert regenerated(folder, {"0:7": 75.0}, since=1.5) == 120 + 15 - 118


def test_the_last_tokens_of_rollouts_that_the_end_of_a_run_lets_go_are_not_the_faults(tmp_path: Path) -> None:
    looks = [
        look(1.0, {"0:7": 50.0}, 50),
        look(3.0, {"0:7": 100.0}, 98, leased=3),
        look(4.0, {"0:7": 150.0}, 149, running=2),
        look(5.0, {"0:7": 200.0}, 193),
        look(6.0, {"0:7": 300.0}, 280),
    ]
    assert regenerated(written(tmp_path, looks), {}, since=2.0) == 7, "before the fault and at work do not count"
    assert regenerated(written(tmp_path, looks), {}, since=5.5) == 20


def test_rollouts_of_a_killed_generator_are_those_whose_calls_broke_there_and_not_its_own_count(tmp_path: Path) -> None:
    """Its own count leaves out calls that have ended there while their last tokens are on the way to the worker."""
    (tmp_path / "run").mkdir()
    folder = written(
        tmp_path / "run", [look(1.0, {"0:7": 50.0}, 50, running=1), look(9.0, {"0:7": 50.0, "0:9": 169.0}, 50)]
    )

    def broken(trajectory: str, address: str = "127.0.0.1:7", reason: str = "broken", message: str = "reset") -> str:
        words = {"event": "generator_misbehaved", "reason": reason, "address": address, "trajectory": trajectory}
        return json.dumps({**words, "message": message}) + "\n"

    folder.logs.mkdir()
    (folder.logs / "rollout-0.log").write_text("no JSON\n" + broken("e0-0.0") * 2 + broken("e0-0.1", reason="hung"))
    others = "".join(broken(f"e0-1.{member}") for member in range(10))
    others += broken("e0-2.0", message="UNAVAILABLE: Failed to connect to remote host: Connection refused")
    (folder.logs / "rollout-1.log").write_text(others + broken("e0-9.0", address="127.0.0.1:9"))
    killed = Endpoint(service="generator", index=0, pid=10**9, grpc="127.0.0.1:7", admin="")
    scene = AttackedRun(
        folder=tmp_path,
        run="chaos",
        redis=EmbeddedServer(tmp_path / "redis"),
        rng=random.Random(0),
        ended=lambda: False,
        deadline=time.monotonic() + 60.0,
    )
    scene.strike_holder(Victim(endpoint=killed, rollouts=6), signal.SIGKILL)
    data = short_run_config(Path("run"), 1)
    result = read_round(folder, data, faults_named("kill -9 generator")[0], scene, (0,), 1.0, "")
    assert (result.in_flight, result.regenerated_tokens, result.regenerated_bound) == (11, 169, 11 * 16)


def test_without_a_timeline_there_is_no_count(tmp_path: Path) -> None:
    assert regenerated(RunFolder(tmp_path), {}) is None


@pytest.mark.parametrize(("cost", "bound"), [(Cost.NOTHING, 0), (Cost.UNSAVED, 5 * 16), (Cost.UNBOUNDED, None)])
def test_the_bound_counts_the_rollouts_of_the_victim_and_not_the_pool(cost: Cost, bound: int | None) -> None:
    assert regenerated_bound(cost, 5, short_run_config(Path("run"), 1)) == bound


def test_unsaved_tokens_of_groups_that_the_schedule_ended_are_no_cost_of_the_fault(tmp_path: Path) -> None:
    """Of two evicted groups, a filtered one and one that has begun again, three may have lost 16 tokens a member."""
    folder = RunFolder(tmp_path)
    mesh = {
        "dropped_groups": {"stale": 1, "straggler_timeout": 1, "filtered_all_right": 3, "run_complete": 2},
        "groups_begun_again_by_reason_and_length_decile": {"restarted:3": 1},
    }
    folder.metrics.write_text("".join(json.dumps({"mesh": each}) + "\n" for each in ({}, mesh)))
    assert groups_ended_unfinished(folder) == 3
    data = short_run_config(Path("run"), 1, "roll")
    assert regenerated_bound(Cost.UNSAVED, 5, data, 3) == (5 + 3 * 4) * 16
    assert regenerated_bound(Cost.NOTHING, 5, data, 3) == 3 * 4 * 16
    planned = short_run_config(Path("run"), 1, "copris", {"curriculum": {"planner": "dars"}})
    assert regenerated_bound(Cost.UNSAVED, 5, planned, 3) == (5 + 3 * 32) * 16


def test_only_killed_redis_members_cut_off_and_processes_outside_are_without_a_bound() -> None:
    unbounded = [fault for fault in FAULTS if fault.cost is Cost.UNBOUNDED and fault.outside is Outside.NOTHING]
    assert len([fault for fault in unbounded if fault.name.startswith("kill -9 redis")]) == 5
    assert all(fault.name.startswith("kill -9 redis") or fault.preset == "rollpacker" for fault in unbounded)
    assert [fault.cost for fault in FAULTS if "outage" in fault.name or "maxmemory" in fault.name] == [Cost.UNSAVED] * 2


def test_a_round_over_its_bound_misses_a_bar_and_one_without_a_bound_has_none() -> None:
    assert missed([_regeneration(2, GOOD), _regeneration(3, replace(GOOD, regenerated_bound=None))]) == []
    assert len(missed([_regeneration(2, replace(GOOD, regenerated_tokens=6))])) == 1


def test_a_fault_is_picked_by_its_name_and_an_unknown_one_is_refused_with_all_names() -> None:
    assert [fault.name for fault in faults_named("kill -9 generator")] == ["kill -9 generator"]
    assert faults_named(None) == list(FAULTS)
    assert len({fault.name for fault in FAULTS}) == 41
    with pytest.raises(ConfigError, match="choose one of: .*kill -9 generator; .*flip a byte of the newest policy"):
        faults_named("kill -9 generators")


def test_only_damaged_files_that_nothing_can_replace_end_a_run_and_their_names_are_on_the_console() -> None:
    not_green = {fault.name: fault.expected_end for fault in FAULTS if not fault.expected_end.green}
    assert [ending.exit_statuses for ending in not_green.values()] == [(2, 1), (2, 1), (0, 1)]
    assert [bool(ending.output_contains) for ending in not_green.values()] == [True, True, False]
