"""A round of the chaos bench passes only if everything that was promised held, and if the fault really struck."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollmesh.config.load import validate_run_config
from rollmesh.errors import ConfigError
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.scheduling import Schedule
from rollmesh.scheduling.presets import PRESETS

from ...chaos.faults import FAULTS, Cost, ExpectedEnd, Fault, Outside, faults_named
from ...chaos.rounds import (
    ChaosRound,
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
    assert bool(config.teachers) is fault.name.endswith(", taught")
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


@pytest.mark.parametrize(("cost", "bound"), [(Cost.NOTHING, 0), (Cost.UNSAVED, 5 * 16), (Cost.UNBOUNDED, None)])
def test_the_bound_counts_the_rollouts_of_the_victim_and_not_the_pool(cost: Cost, bound: int | None) -> None:
    assert regenerated_bound(cost, 5, short_run_config(Path("run"), 1)) == bound


def test_a_fault_is_picked_by_its_name_and_an_unknown_one_is_refused_with_all_names() -> None:
    assert [fault.name for fault in faults_named("kill -9 generator")] == ["kill -9 generator"]
    assert faults_named(None) == list(FAULTS)
    assert len({fault.name for fault in FAULTS}) == 45
    with pytest.raises(ConfigError, match="choose one of: .*kill -9 generator; .*flip a byte of the newest policy"):
        faults_named("kill -9 generators")
