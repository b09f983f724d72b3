"""Options of ``rollmesh sim``: arms, their errors, and the command itself."""

import json

import pytest
from typer.testing import CliRunner

from rollmesh.cli.main import app
from rollmesh.errors import ConfigError
from rollmesh.scheduling.presets import PRESETS
from rollmesh.sim.arms import arms_of, parse_setup
from rollmesh.sim.figures import Figures
from rollmesh.sim.simulation_setup import DEFAULT_RUN

FIGURES = Figures(
    updates=2,
    updates_per_second=0.1,
    updates_per_hour=360,
    update_seconds=(5.0, 15.0),
    update_seconds_p50=10,
    update_seconds_p90=14,
    trained_tokens_per_second=100,
    generated_tokens_per_second=100,
    bubble_ratio=0.5,
    rollout_bubble_ratio=0.25,
    off_policy_token_share=0.5,
    mean_staleness=1.5,
    staleness={},
    version_span=0.5,
    preemptions=0,
    reprefill_share=0,
    wasted_tokens={},
    trainer_wait_share=0.5,
    device_hours_per_update=0.1,
)
SMALL = [
    "schedule.groups_per_batch=2",
    "schedule.group_size=2",
    "rollout.max_new_tokens=400",
    "generator.replicas=2",
    "trainer.train_steps=3",
]


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


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"compare": "copris,nosuch"}, "nosuch"),
        ({"sweep": "schedule.nosuch=1,2"}, "nosuch"),
        ({"sweep": "schedule.pool_size"}, "FIELD=VALUE"),
        ({"sweep": "trainer.learning_rate=1e-5,1e-4"}, "does not depend on this field"),
        ({"sweep": "schedule.max_staleness=1,2", "compare": "sync"}, "give one of them"),
    ],
)
def test_a_comparison_that_makes_no_sense_is_refused(options, named):
    with pytest.raises(ConfigError, match=named):
        arms_of(None, SMALL, [], [], **options)


@pytest.mark.parametrize(
    ("item", "named"),
    [
        ("nosuch=1", "nosuch"),
        ("trainer_devices=0", "trainer_devices=0"),
        ("swap_seconds=.nan", "swap_seconds"),
    ],
)
def test_a_bad_setting_is_refused_by_name(item, named):
    with pytest.raises(ConfigError, match=named):
        parse_setup([item])


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["gpu=abacus"], "abacus"),
        (["model=32b", "gpu=L40S"], "do not"),
        (["prompt_tokens=600"], "generator.max_context_tokens"),
        (["colocated=true", "trainer_devices=5"], "trainer_devices=2"),
    ],
)
def test_devices_that_do_not_fit_are_refused(settings, named):
    overrides = [*SMALL, "generator.max_context_tokens=912"]
    with pytest.raises(ConfigError, match=named):
        arms_of(None, overrides, settings, [])


def test_lengths_beyond_those_of_the_trace_are_refused_with_the_remedy():
    overrides = [*SMALL, "rollout.max_new_tokens=16001", "generator.max_context_tokens=20000"]
    with pytest.raises(ConfigError, match=r"lengths=deepcoder-14b is known up to 16000 tokens.*max_new_tokens=16001"):
        arms_of(None, overrides, [], [])
    assert arms_of(None, overrides, ["lengths=lognormal:median=9964,sigma=0.8,share=0.9"], [])


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
    sets = [argument for item in SMALL for argument in ("--set", item)]
    command = ["sim", *sets, "--compare", "sync,copris", "--fail", "deaths_per_hour=1", "--check", "--json"]
    first, second = (CliRunner().invoke(app, command) for _ in range(2))
    assert first.exit_code == 0, first.output
    lines = [json.loads(line) for line in first.stdout.splitlines()]
    assert [line["arm"] for line in lines] == ["sync", "copris"]
    assert lines[0]["off_policy_token_share"] == 0
    assert first.stdout == second.stdout


def test_compare_without_presets_takes_all_of_them():
    sets = [argument for item in SMALL for argument in ("--set", item)]
    result = CliRunner().invoke(app, ["sim", *sets, "--compare", "--json"])
    assert result.exit_code == 0, result.output
    assert [json.loads(line)["arm"] for line in result.stdout.splitlines()] == list(PRESETS)


def test_a_simulation_at_scale_prints_its_cost():
    small = ["schedule.pool_size=16", "schedule.max_staleness=null", *SMALL]
    sets = [argument for item in small for argument in ("--set", item)]
    printed, written = (CliRunner().invoke(app, ["sim", "--scale", *sets, *more]) for more in ([], ["--json"]))
    assert printed.exit_code == 0, printed.output
    assert "microseconds each" in printed.stdout
    cost = json.loads(written.stdout)["cost"]
    assert cost["finished"] >= 12 and cost["peak_bytes"] > 10e6 and cost["microseconds_per_trajectory"] > 0


@pytest.mark.parametrize("columns", [80, 200])
def test_the_tables_name_every_arm_and_every_figure_at_the_width_of_the_terminal(columns):
    sets = [argument for item in SMALL for argument in ("--set", item)]
    sweep = ["sim", *sets, "--sweep", "schedule.max_staleness=1,2"]
    result = CliRunner().invoke(app, sweep, env={"COLUMNS": str(columns)})
    assert result.exit_code == 0, result.output
    for text in ("schedule.max_staleness=1", "schedule.max_staleness=2", "updates/h", "device h/update"):
        assert text in result.stdout
    assert "…" not in result.stdout
    assert max(len(line) for line in result.stdout.splitlines()) <= columns
