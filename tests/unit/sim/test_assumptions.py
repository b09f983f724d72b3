"""What ``rollmesh sim`` assumes: the model of the run file, everything printed, and the times of a run folder."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.workloads import group_of, scored
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.sealing import SECRET_FILE
from rollmesh.cli.main import app
from rollmesh.config.recipes import recipe_file
from rollmesh.mesh import Cursor
from rollmesh.sim.simulation_setup import DEFAULT_RUN, SimulationSetup
from rollmesh.types import Batch, Prompt, Segment

from ...kit.checkpoint_samples import write_batch

BEGINNING = 1_700_000_000.0
SMALL = ("--set", "trainer.train_steps=3", "--lengths", "lognormal:median=100,sigma=0.5,share=0.5")


def sim(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["sim", *arguments])


def assumed(*arguments: str) -> dict[str, Any]:
    result = sim(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout.splitlines()[0])["assumed"])


def test_the_model_is_that_of_the_run_file_unless_the_command_names_one() -> None:
    run = str(recipe_file("countdown", "demo.yaml"))
    own, named = assumed(run, *SMALL), assumed(run, *SMALL, "--model", "0.5b")
    assert (Path(own["model"]), named["model"]) == (recipe_file("countdown", "model"), "0.5b")


def test_a_model_that_is_not_on_this_machine_is_refused_with_the_sizes_that_are_known(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(DEFAULT_RUN.read_text().replace("path: 7b", "path: models/absent"))
    result = sim(str(run))
    assert result.exit_code == 2
    assert "model.path=models/absent" in result.stderr and "--model 0.5b, 1.5b, 7b" in result.stderr


def test_every_setting_and_constant_is_printed() -> None:
    result = sim(*SMALL, "--compare", "sync,copris")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    settings = {*SimulationSetup.model_fields} - {"curve", "domains"}  # which are off
    constants = {"memory", "compute", "step_seconds", "cache_share", "train_flops_per_weight", "solve_rate"}
    for name in settings | constants:
        assert f" {name}=" in text, name
    assert "--calibrate RUN_FOLDER" in text


def recorded(folder: Path, preset: str = "sync") -> Path:
    """A run of four steps, 10 s each: 2 ms per decode step and 0.1 ms per token, 4 s of gradient for 1,000 tokens."""
    demo = recipe_file("countdown", "demo.yaml").read_text().splitlines()
    own = ("  preset:", "  max_staleness:", "  pool_size:")
    config = "\n".join(line for line in demo if not line.startswith(own))
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(config.replace("schedule:", f"schedule:\n  preset: {preset}"))
    (folder / "logs").mkdir()
    lines, cuts, trained, loads = [], [], [], []
    for step in range(1, 5):
        at = BEGINNING + 10 * step
        cuts.append(_event("batch_cut", at - 5, train_step=step))
        sizes = {"batch": {"trained_tokens": 900}, "forward_tokens": 1000, "seconds": {"gradient": 4.0}}
        lines.append({"train_step": step, "time": at - 0.5, **sizes})
        trained.append(_event("step_trained", at - 0.25, train_step=step))
        trained.append(_event("policy_announced", at, train_step=step))
        loads.append(_event("policy_in_service", at, train_step=step, seconds=0.3, pause_seconds=0.1))
    _write(folder / "metrics.jsonl", lines)
    _write(folder / "logs" / "rollout-0.log", cuts)
    _write(folder / "logs" / "trainer-0.log", trained)
    _write(folder / "logs" / "generator-0.log", loads)
    samples: list[dict[str, Any]] = []
    steps = tokens = 0
    for second in range(45):
        steps, tokens = steps + 100, tokens + (3000 if second % 2 else 200)
        work = {"decode_steps": steps, "generated_tokens": tokens, "prefill_tokens": 0, "cpu_seconds": second}
        work |= {"busy_seconds": 0.002 * steps + 0.0001 * tokens}
        samples.append({"t": BEGINNING + second, "work": work, "generators": [{"serving": True}]})
    _write(folder / "timeline.jsonl", samples)
    (folder / SECRET_FILE).write_text("0" * 64)
    (folder / "checkpoints").mkdir()
    prompt = Prompt(prompt_id="p", token_ids=np.arange(3, dtype=np.int32), verifier="exact")
    ids, logprobs = np.arange(50, dtype=np.int32), np.zeros(50, np.float32)
    answer = Segment(token_ids=ids, behavior_logprobs=logprobs, policy_version=0, kv_min_version=0)
    group = group_of(0, [scored(prompt, "e0-0", member, (answer,), 1.0) for member in range(8)])
    store = CheckpointStore(folder / "checkpoints", b"0" * 64)
    write_batch(store, Batch(train_step=1, groups=(group,)), Cursor(epoch=0, index=1))
    return folder


def _event(name: str, at: float, **fields: Any) -> dict[str, Any]:
    return {"event": name, "timestamp": datetime.fromtimestamp(at, UTC).isoformat(), **fields}


def _write(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_times_of_a_run_replace_those_of_devices(tmp_path: Path) -> None:
    found = assumed("--calibrate", str(recorded(tmp_path)), "--set", "trainer.train_steps=3")
    assert found["calibrated_on"] == found["lengths"] == str(tmp_path)
    assert (found["decode_step_seconds"], found["seconds_per_sampled_token"]) == ("0.002", "0.0001")
    assert found["train_seconds_per_token"] == "0.004"
    # From the cut to the end of the step 4.5 s, 4 s of them for 1,000 tokens; 100 tokens of prompts are fixed.
    assert found["step_fixed_seconds"] == "0.9"
    assert (found["publish_seconds"], found["fetch_seconds"], found["swap_seconds"]) == ("0.5", "0.2", "0.1")
    assert not {"gpu", "model", "trainer_devices", "compute"} & found.keys()


def test_the_time_between_two_starts_of_a_run_is_no_time_of_a_step(tmp_path: Path) -> None:
    found = []
    for hour in (0, 3600):
        folder = recorded(tmp_path / str(hour))
        lines = [json.loads(line) for line in (folder / "timeline.jsonl").read_text().splitlines()]
        # The samples of a start an hour before, whose train steps are gone.
        _write(folder / "timeline.jsonl", [line | {"t": line["t"] - hour} for line in lines[:5] if hour] + lines)
        found.append(assumed("--calibrate", str(folder), *SMALL)["reward_seconds"])
    assert found[0] == found[1]
    late = recorded(tmp_path / "late")
    steps = [json.loads(line) for line in (late / "timeline.jsonl").read_text().splitlines()]
    _write(late / "timeline.jsonl", [line | {"t": line["t"] + 100 * (line["t"] > BEGINNING + 22)} for line in steps])
    result = sim("--calibrate", str(late), *SMALL)
    assert result.exit_code == 2 and "0 train steps with their times" in result.stderr


def test_a_run_that_overlapped_has_the_contention_in_its_times(tmp_path: Path) -> None:
    found = assumed("--calibrate", str(recorded(tmp_path, "areal")), *SMALL)
    assert found["cores"] == "generators and trainer never slow each other"


@pytest.mark.parametrize(
    ("missing", "named"),
    [("timeline.jsonl", "no decode steps"), ("metrics.jsonl", "0 train steps"), ("config.yaml", "config.yaml")],
)
def test_a_folder_without_the_times_is_refused(tmp_path: Path, missing: str, named: str) -> None:
    (recorded(tmp_path) / missing).unlink()
    result = sim("--calibrate", str(tmp_path), *SMALL)
    assert result.exit_code == 2 and named in result.stderr
