"""Bad input of ``rollmesh sim`` ends with status 2 and a message that names the field, the value and the remedy."""

import pytest
from typer.testing import CliRunner

from rollmesh.cli.main import app
from rollmesh.errors import ConfigError
from rollmesh.sim.event_clock import MOST_EVENTS, EventClock

LONG = ("rollout.max_new_tokens=900000", "generator.max_context_tokens=900512")


def error_of(*options, sets=()):
    result = CliRunner().invoke(app, ["sim", *(item for each in sets for item in ("--set", each)), *options])
    assert result.exit_code == 2, result.output
    return result.stderr


def assert_names(error, *texts):
    for text in texts:
        assert text in error


@pytest.mark.parametrize(
    ("options", "sets", "named"),
    [
        (("--with", "swap_seconds=-1"), (), ("swap_seconds=-1", "greater than or equal to 0")),
        (("--with", "nosuch=1"), (), ("--with nosuch=1: expected NAME=VALUE, with a name of gpu,",)),
        (
            ("--with", "colocated=true", "--with", "trainer_devices=5"),
            (),
            ("colocated with trainer_devices=5", "; set trainer_devices="),
        ),
        (("--with", "reward_seconds=.nan"), (), ("reward_seconds=nan", "finite number")),
        (("--model", "32b", "--gpu", "L40S"), (), ("gpu=L40S", "65.5 GB do not", "a larger GPU or a smaller model")),
        (
            ("--gpu", "L40S", "--lengths", "dapo-32b"),
            LONG,
            ("gpu=L40S", "there is cache for", "a call may have 900256", "shorter lengths"),
        ),
        ((), ("generator.kv_token_capacity=999",), ("generator.kv_token_capacity=999", "one call", "increase it")),
        (("--with", "prompt_tokens=600"), (), ("prompt_tokens=600", "max_context_tokens=16512", "raise the context")),
        (
            ("--lengths", "no-such-folder"),
            (),
            ("lengths=no-such-folder: no such run folder", "deepcoder-14b, dapo-32b"),
        ),
        (("--sweep", "schedule.nosuch=1,2"), (), ("schedule.nosuch", "known here", "pool_size", "(got 1)")),
        (
            ("--sweep", "schedule.max_staleness=0,2"),
            ("schedule.preset=sync",),
            ("schedule.max_staleness=2", "schedule.preset=sync", "leave it null or take another preset"),
        ),
        (("--lengths", ""), (), ("--lengths=''", "empty; give a value")),
        (
            ("--lengths", "dapo-32b", "--with", "lengths=deepcoder-14b"),
            (),
            ("--lengths dapo-32b with --with lengths=deepcoder-14b", "give one of them"),
        ),
        (
            ("--export", "runs/mine", "--compare", "--json"),
            (),
            ("--export with --compare, --json: it simulates nothing",),
        ),
        (("--compare", "copris,nosuch"), (), ("--compare nosuch: unknown; the presets are sync,",)),
        (("--sweep", "schedule.pool_size"), (), ("--sweep schedule.pool_size: expected FIELD=VALUE",)),
        (("--sweep", "trainer.learning_rate=1e-5,1e-4"), (), ("--sweep trainer.learning_rate", "does not depend on")),
        (("--sweep", "schedule.max_staleness=1,2", "--compare", "sync"), (), ("--compare and --sweep: give one",)),
        (
            (),
            ("rollout.max_new_tokens=16001", "generator.max_context_tokens=20000"),
            ("lengths=deepcoder-14b is known up to 16000 tokens", "rollout.max_new_tokens=16001", "lower it, or give"),
        ),
        (("--compare", "sync,copris,sync"), (), ("--compare sync,copris,sync: sync is there twice",)),
        (("--sweep", "schedule.max_staleness=1,1"), (), ("--sweep 1,1: 1 is there twice",)),
        (("--compare", "mine.yaml"), (), ("--compare mine.yaml", "rollmesh sim mine.yaml --compare")),
        (("--fail", "deaths_per_hour=4000"), (), ("--fail deaths_per_hour=4000", "less than or equal to 3600")),
        (("--fail", "deaths_per_hour=-1"), (), ("--fail deaths_per_hour=-1", "greater than or equal to 0")),
        (("--fail", "slow_generators=1.5"), (), ("--fail slow_generators=1.5", "a valid integer")),
        (("--fail", "meteor=1"), (), ("--fail meteor=1: expected NAME=VALUE, with a name of deaths_per_hour,",)),
    ],
)
def test_a_value_that_cannot_be_simulated(options, sets, named):
    assert_names(error_of(*options, sets=sets), *named)


def test_a_page_that_cannot_be_written_is_refused_before_anything_is_simulated(tmp_path):
    for file in (tmp_path, tmp_path / "missing" / "sim.html"):
        # The simulation would end with another error: no batch is ever cut.
        error = error_of("--page", str(file), sets=("generator.replicas=0",))
        assert_names(error, f"--page {file}: give a file in a folder that exists")


@pytest.mark.parametrize(
    ("options", "sets", "waits_for"),
    [
        (
            (),
            ("generator.replicas=0",),
            "64 more ready groups of 64, with 0 serving generators of generator.replicas=0",
        ),
        (
            ("--fail", "trainer_crashes_per_hour=3600"),
            ("trainer.train_steps=2", "schedule.groups_per_batch=4"),
            "the trainer: step 1 is cut and not trained yet",
        ),
    ],
)
def test_a_run_that_can_never_cut_is_named_with_what_it_waits_for(options, sets, waits_for):
    error = error_of(*options, sets=sets)
    assert_names(error, "schedule.preset=copris", "is not cut", f"waits for {waits_for}", "change the schedule, --fail")


def test_more_events_than_a_hundred_million_need_the_option():
    assert MOST_EVENTS == 10**8
    clock = EventClock(most_events=1)
    clock.call_at(1.0, lambda: None)
    clock.call_at(2.0, lambda: None)
    assert clock.step()
    with pytest.raises(ConfigError, match=r"more than 1 events by 2 virtual seconds: .*trainer.train_steps.* --long"):
        clock.step()
