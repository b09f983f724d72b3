"""Options of ``rollmesh sim``: arms, their errors, the command itself, and the page of simulated arms."""

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.workloads import group_of, scored
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.sealing import SECRET_FILE
from rollmesh.cli.main import app
from rollmesh.config.recipes import recipe_file
from rollmesh.errors import ConfigError
from rollmesh.mesh import Cursor
from rollmesh.scheduling.presets import PRESETS
from rollmesh.sim.arms import arms_of
from rollmesh.sim.run_timeline import RunTimeline
from rollmesh.sim.simulated_mesh import SimulatedMesh
from rollmesh.sim.simulation_page import best_arm
from rollmesh.sim.simulation_setup import DEFAULT_RUN, SimulationSetup
from rollmesh.types import Batch, Prompt

from ...kit.checkpoint_samples import write_batch
from ...kit.records import policy_tokens
from .meshes import mesh_settings

SMALL = [
    "schedule.groups_per_batch=2",
    "schedule.group_size=2",
    "rollout.max_new_tokens=400",
    "generator.replicas=2",
    "trainer.train_steps=3",
]


def sim(*arguments: str, sets: Sequence[str] = (), env: dict[str, str] | None = None) -> Any:
    return CliRunner().invoke(app, ["sim", *arguments, *(part for item in sets for part in ("--set", item))], env=env)


def test_arms_differ_in_the_schedule_only():
    sync, copris = arms_of(None, SMALL, [], [], compare="sync,copris")
    assert (sync.name, copris.name) == ("sync", "copris")
    assert sync.settings.prompts == copris.settings.prompts
    assert sync.settings.schedule != copris.settings.schedule


def test_compared_presets_have_the_settings_that_go_with_them_and_as_many_trajectories_per_update():
    sync, sorted_, tis = arms_of(None, SMALL, [], [], compare="sync,sorted,dart")
    assert sorted_.settings.schedule.prompt_repeats == sorted_.settings.prompts.repeats == 2
    assert sorted_.settings.schedule.groups_per_batch == 4  # Groups of one; sync has two groups of two.
    assert (sync.settings.fleet.rules.at_once, tis.settings.fleet.rules.at_once) == (None, 1)


def test_a_run_file_keeps_its_own_settings(tmp_path):
    run = tmp_path / "run.yaml"
    run.write_text(DEFAULT_RUN.read_text())
    with pytest.raises(ConfigError, match=r"set trainer\.algorithm\.advantage=reinforce_pp"):
        arms_of(run, [*SMALL, "schedule.preset=sorted"], [], [])
    (arm,) = arms_of(None, [*SMALL, "schedule.preset=sorted"], [], [])
    assert arm.settings.schedule.groups_per_batch == 2


def test_recorded_lengths_are_the_same_in_every_arm_and_fit_the_context(tmp_path):
    trace = tmp_path / "trace.jsonl"
    line = '{"group": "a", "stream": 3, "prompt_len": 120, "out_lens": [200, 90], "obs_lens": [650]}\n'
    trace.write_text(line)
    sync, copris = arms_of(None, SMALL, [f"lengths={trace}"], [], compare="sync,copris")
    assert sync.settings.prompts == copris.settings.prompts and copris.settings.prompts.count == 1
    assert copris.settings.prompts.work(4, 2).lengths == (200, 200)  # The environment's 650 exceed the budget.
    large = [*SMALL, "rollout.max_new_tokens=940"]
    (arm,) = arms_of(None, large, [f"lengths={trace}"], [])
    assert arm.settings.prompts.work(4, 2).lengths == (290, 290)
    trace.write_text(line.replace("120", "860"))
    with pytest.raises(ConfigError, match=r"stream=3, .*=400, have 1060 tokens .*max_context_tokens=1000; low"):
        arms_of(None, [*SMALL, "generator.max_context_tokens=1000"], [f"lengths={trace}"], [])
    with pytest.raises(ConfigError, match=r"prompt_tokens=40 with lengths=.*leave it out"):
        arms_of(None, SMALL, [f"lengths={trace}", "prompt_tokens=40"], [])


def test_the_command_prints_one_object_per_arm_and_the_same_twice():
    options = ["--compare", "sync,copris", "--fail", "deaths_per_hour=1", "--check", "--json"]
    first, second = (sim(*options, sets=SMALL) for _ in range(2))
    assert first.exit_code == 0, first.output
    lines = [json.loads(line) for line in first.stdout.splitlines()]
    assert [line["arm"] for line in lines] == ["sync", "copris"]
    assert lines[0]["off_policy_token_share"] == 0
    assert first.stdout == second.stdout


def test_compare_without_presets_takes_all_of_them():
    result = sim("--compare", "--json", sets=SMALL)
    assert result.exit_code == 0, result.output
    assert [json.loads(line)["arm"] for line in result.stdout.splitlines()] == list(PRESETS)


def test_a_simulation_at_scale_prints_its_cost():
    small = ["schedule.pool_size=16", "schedule.max_staleness=null", *SMALL]
    printed, written = (sim("--scale", *more, sets=small) for more in ([], ["--json"]))
    assert printed.exit_code == 0, printed.output
    assert "microseconds each" in printed.stdout
    cost = json.loads(written.stdout)["cost"]
    assert cost["finished"] >= 12 and cost["peak_bytes"] > 10e6 and cost["microseconds_per_trajectory"] > 0


@pytest.mark.parametrize("columns", [80, 200])
def test_the_tables_name_every_arm_and_every_figure_at_the_width_of_the_terminal(columns):
    result = sim("--sweep", "schedule.max_staleness=1,2", sets=SMALL, env={"COLUMNS": str(columns)})
    assert result.exit_code == 0, result.output
    for text in ("schedule.max_staleness=1", "schedule.max_staleness=2", "updates/h", "device h/update"):
        assert text in result.stdout
    assert "…" not in result.stdout
    assert max(len(line) for line in result.stdout.splitlines()) <= columns


BEGINNING = 1_700_000_000.0
SMALL_OF_ASSUMPTIONS = ("--set", "trainer.train_steps=3", "--lengths", "lognormal:median=100,sigma=0.5,share=0.5")


def assumed(*arguments: str) -> dict[str, Any]:
    result = sim(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout.splitlines()[0])["assumed"])


def test_the_model_is_that_of_the_run_file_unless_the_command_names_one() -> None:
    run = str(recipe_file("countdown", "demo.yaml"))
    own, named = assumed(run, *SMALL_OF_ASSUMPTIONS), assumed(run, *SMALL_OF_ASSUMPTIONS, "--model", "0.5b")
    assert (Path(own["model"]), named["model"]) == (recipe_file("countdown", "model"), "0.5b")


def test_a_model_that_is_not_on_this_machine_is_refused_with_the_sizes_that_are_known(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(DEFAULT_RUN.read_text().replace("path: 7b", "path: models/absent"))
    result = sim(str(run))
    assert result.exit_code == 2
    assert "model.path=models/absent" in result.stderr and "--model 0.5b, 1.5b, 7b" in result.stderr


def test_every_setting_and_constant_is_printed() -> None:
    result = sim(*SMALL_OF_ASSUMPTIONS, "--compare", "sync,copris")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    settings = {*SimulationSetup.model_fields} - {"curve", "domains", "drafts"}  # which are off
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
    answer = (policy_tokens(range(50)),)
    group = group_of(0, [scored(prompt, "e0-0", member, answer, 1.0) for member in range(8)])
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


def test_a_run_that_overlapped_has_the_contention_in_its_times(tmp_path: Path) -> None:
    found = assumed("--calibrate", str(recorded(tmp_path, "areal")), *SMALL_OF_ASSUMPTIONS)
    assert found["cores"] == "generators and trainer never slow each other"


@pytest.mark.parametrize(
    ("missing", "named"),
    [("timeline.jsonl", "no decode steps"), ("metrics.jsonl", "0 train steps"), ("config.yaml", "config.yaml")],
)
def test_a_folder_without_the_times_is_refused(tmp_path: Path, missing: str, named: str) -> None:
    (recorded(tmp_path) / missing).unlink()
    result = sim("--calibrate", str(tmp_path), *SMALL_OF_ASSUMPTIONS)
    assert result.exit_code == 2 and named in result.stderr


RUN = Path(__file__).parents[3] / "examples" / "countdown-cpu.yaml"


def validate(*options):
    return CliRunner().invoke(app, ["config", "validate", str(RUN), *options])


def test_the_last_line_has_the_figures_and_what_they_assume():
    sets = ("schedule={preset: sync}", "trainer.train_steps=1000")
    result = validate(*(item for each in sets for item in ("--set", each)), "--simulate", "--with", "gpu=H200")
    assert result.exit_code == 0, result.output
    line = result.stdout.splitlines()[-1]
    assert line.startswith("simulated, 20 train steps: ")
    for text in (
        " updates/s, staleness 0.00 (at most 0), the trainer waits ",
        "assumed: gpu=H200, model=",
        "compute=0.4",
    ):
        assert text in line
    assert "countdown" in line.partition("model=")[2].partition(",")[0]


def test_without_the_option_nothing_is_simulated():
    result = validate()
    assert result.exit_code == 0 and "simulated" not in result.stdout


def test_a_setting_without_the_simulation_is_refused():
    result = validate("--with", "gpu=H200")
    assert result.exit_code == 2 and "--with gpu=H200: a setting of the simulation; add --simulate" in result.stderr


def test_the_best_arm_has_the_least_staleness_among_those_with_nearly_the_largest_throughput():
    def arm(tokens, staleness):
        return SimpleNamespace(figures=SimpleNamespace(trained_tokens_per_second=tokens, mean_staleness=staleness))

    slow, thrifty, greedy = arm(97.9, 0.1), arm(98.0, 1.0), arm(100.0, 3.0)
    assert best_arm([slow, thrifty, greedy]) is thrifty
    assert best_arm([greedy]) is greedy


def test_samples_change_no_result_and_their_number_is_bounded():
    settings, timeline = mesh_settings("copris"), RunTimeline()
    assert SimulatedMesh(settings, timeline=timeline).run() == SimulatedMesh(settings).run()
    time, versions, running = timeline.arrays()
    assert versions.shape == running.shape == (4, len(time)) and len(time) > 20
    assert set(versions.ravel().tolist()) == {-1, 0, 1, 2, 3, 4, 5} and running.max() <= 8
    for moment in range(100_000):
        timeline.observe(1e6 + moment, {})
    assert len(timeline.times) < 1024 and timeline.times[0] == time[0]


def test_the_command_writes_a_page_with_the_figures_and_the_calls_of_every_arm(tmp_path):
    page = tmp_path / "sim.html"
    result = sim("--sweep", "schedule.max_staleness=1,2", "--page", str(page), sets=SMALL)
    assert result.exit_code == 0, result.output
    arms = json.loads(re.findall(r'id="recorded">(.*?)</script>', page.read_text())[0])["arms"]
    assert [arm["name"] for arm in arms] == ["schedule.max_staleness=1", "schedule.max_staleness=2"]
    assert sum(arm["best"] for arm in arms) == 1
    for arm in arms:
        calls = np.zeros(len(arm["time"]))
        for part in arm["running"]:
            calls[part["first"] : part["first"] + len(part["calls"])] += part["calls"]
        assert 0 < calls.max() <= max(arm["slots"]) and len(arm["update_seconds"]) >= 1
        versions = [part["policy_version"] for part in arm["generators"]]
        assert versions == sorted(versions) and len(versions) > 1
