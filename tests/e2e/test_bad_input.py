"""Bad input on the command line ends in a clear error, and nothing is lost."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from typer.testing import CliRunner

from rollmesh.cli.main import app
from rollmesh.config.recipes import recipe_file
from rollmesh.preflight.trial import FIRST_ROWS
from rollmesh.runtime.lifecycle import EXIT_CONFIG
from rollmesh.store import EmbeddedOptions, EmbeddedServer

from .conftest import WAIT_SECONDS, CommandLine, until, write_small_run

pytestmark = pytest.mark.slow

HardRun = tuple[CommandLine, subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]
"""The run file, how the run ended, and how the second launcher ended."""

MOODY_VERIFIER = """
import itertools
import math

calls = itertools.count()

def reward(response, metadata):
    match next(calls) % 16:
        case 0: return math.nan
        case 1: return "1.0"
    return float(metadata["answer"] in response)

def text(response, metadata):
    return "1.0"
"""
"""Its moods depend on nothing that is sampled: lengths of answers, for one, may miss a mood in a whole run."""


def write_rows(folder: Path) -> dict[str, Any]:
    """Countdown prompts as a table, for verifiers of one's own; returns the ``data`` section."""
    puzzles = [(a, b, c) for a in range(1, 5) for b in range(5, 7) for c in range(7, 10)]
    rows = [{"prompt": f"{a} {b} {c} > {b - a} :", "answer": str(b - a)} for a, b, c in puzzles]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "moody.py").write_text(MOODY_VERIFIER)
    return {"source": {"type": "jsonl", "path": "rows.jsonl"}}


# Refused before anything is created or started --------------------------------------------------------------------

REFUSED = [
    ({"shedule": {"pool_size": 8}}, "shedule: unknown key; did you mean schedule?"),
    ({"trainer": {"train_steps": "many"}}, "trainer.train_steps: Input should be a valid integer"),
    ({"schedule": {"pool_size": 400}}, "schedule.pool_size=400 is above window_groups * (group_size + spare_members)"),
    (
        {"schedule": {"group_size": 1, "pool_size": None}},
        "schedule.group_size=1: grpo compares the members of a group, so it needs at least 2",
    ),
    ({"schedule": {"window_groups": 1}}, "schedule.window_groups=1 is below schedule.groups_per_batch="),
    ({"schedule": {"spare_groups": 4}}, "schedule.spare_groups=4: schedule.preset=copris opens no waves of groups"),
    ({"rollout": {"top_p": 0.9}}, "rollout.top_p: unknown key; training samples from the full vocabulary"),
    ({"trainer": {"algorithm": {"old_logprobs": "stage_end"}}}, "stage_end needs a barrier, which schedule.preset="),
    ({"rollout": {"temperature": 0}}, "rollout.temperature: Input should be greater than or equal to 0.001 (got 0)"),
    ({"rollout": {"max_new_tokens": 4096}}, "generator.max_context_tokens=640 is less than"),
    ({"model": {"path": "no/such/model"}}, "model.path=no/such/model: no/such/model contains no config.json"),
    ({"reward": {"verifier": "countdwn"}}, "reward.verifier: 'countdwn' is none of exact, numeric"),
    ({"data": {"source": {"type": "jsonl", "path": "absent.jsonl"}}}, "data.source.path=absent.jsonl: no such file"),
]


@pytest.mark.parametrize(("sections", "message"), REFUSED)
def test_a_run_that_cannot_work_is_refused_by_validate_and_by_up_before_anything_starts(
    tmp_path: Path, sections: dict[str, Any], message: str
) -> None:
    line = write_small_run(tmp_path, **sections)
    for command in (["config", "validate"], ["up"]):
        done = CliRunner().invoke(app, [*command, str(line.run_file)])
        assert done.exit_code == 2, done.output
        assert message in done.stderr
    assert not line.folder.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["up", "absent.yaml"], "absent.yaml: cannot be read: No such file or directory"),
        (["status", "{tmp}"], "no config.yaml there; is this a run folder?"),
        (["eval", "{tmp}"], "no config.yaml there; is this a run folder?"),
        (["explain", "{tmp}", "1"], "no config.yaml there; is this a run folder?"),
        (["rollback", "{tmp}", "--version", "1"], "no config.yaml there; is this a run folder?"),
        (["up", "{file}", "--set", "trainer.train_steps"], "--set trainer.train_steps: expected a.b=value"),
    ],
)
def test_a_path_or_an_override_that_means_nothing_is_a_clear_error(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    file = write_small_run(tmp_path).run_file
    done = CliRunner().invoke(app, [a.format(tmp=tmp_path, file=file) for a in arguments])
    assert done.exit_code == 2
    assert message in done.stderr


# Refused by a service ---------------------------------------------------------------------------------------------


def test_a_model_that_the_engine_cannot_compute_is_refused_before_a_service_starts(small_run) -> None:
    line = small_run(model={"path": "model"}, generator={"replicas": 1}, evaluation={"before_and_after": False})
    model = line.run_file.parent / "model"
    shutil.copytree(recipe_file("countdown", "model"), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    done = line.run("up", str(line.run_file))
    assert done.returncode == 2, done.stdout
    assert "model.path=model: config.hidden_act='gelu': only silu is supported" in done.stderr
    assert list(line.folder.glob("services/*")) == []


@pytest.mark.long
def test_a_bad_row_after_the_first_ones_ends_the_run_at_once_and_the_error_names_its_line(tmp_path: Path) -> None:
    good = [{"prompt": f"{a} {b} 5 > 7 :", "answer": "7"} for a in range(1, 10) for b in range(1, 10)]
    rows = [*(good * (1 + FIRST_ROWS // len(good))), {"question": "1 2 5 > 7 :", "answer": "7"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = write_small_run(
        tmp_path,
        data={"source": {"type": "jsonl", "path": "rows.jsonl"}},
        reward={"verifier": "exact"},
        generator={"replicas": 1},
        evaluation={"before_and_after": False},
    )
    done = line.run("up", str(line.run_file))
    assert done.returncode == 2, done.stdout
    assert f"rows.jsonl:{len(rows)}: field 'prompt' is missing; the row has question, answer" in done.stderr
    assert str(line.folder / "logs" / "rollout-0.log") in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"reward": {"verifier": "no_such_module:reward"}}, "reward.verifier: no module 'no_such_module'"),
        ({"reward": {"options": {"strictness": 3}}}, "reward.options: countdown got an unexpected keyword"),
    ],
)
def test_a_service_that_cannot_start_says_so_with_a_status_of_its_own(
    tmp_path: Path, sections: dict[str, Any], message: str
) -> None:
    line = write_small_run(tmp_path, **sections)
    done = line.run("reward", str(line.run_file))
    assert done.returncode == EXIT_CONFIG, done.stderr
    last = json.loads(done.stderr.splitlines()[-1])
    assert message in last["message"]


# Redis that cannot be trusted -------------------------------------------------------------------------------------


@pytest.fixture
def locked_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(tmp_path / "redis", EmbeddedOptions(password="right"))
    server.start()
    yield server
    server.kill()


def test_a_wrong_password_and_an_evicting_server_are_refused_before_a_service_starts(
    tmp_path: Path, locked_server: EmbeddedServer
) -> None:
    line = write_small_run(tmp_path, store={"url": locked_server.url})
    wrong = line.run("up", str(line.run_file), "--set", "store.password=wrong")
    assert wrong.returncode == 2
    assert "rejects the credentials" in wrong.stderr

    with redis.Redis(unix_socket_path=str(locked_server.socket_path), password="right") as client:
        client.config_set("maxmemory-policy", "volatile-lru")
    evicting = line.run("up", str(line.run_file), "--set", "store.password=right")
    assert evicting.returncode == 2
    assert "maxmemory-policy volatile-lru, which may evict keys of the queue: set it to noeviction" in evicting.stderr
    assert list(line.folder.glob("services/*")) == []


# One run that meets all of it -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A Redis that the launcher does not start and cannot restart."""
    own = EmbeddedServer(tmp_path_factory.mktemp("redis"))
    own.start()
    yield own
    own.kill()


@pytest.fixture(scope="module")
def hard_run(tmp_path_factory: pytest.TempPathFactory, server: EmbeddedServer) -> HardRun:
    """A whole run whose verifier fails now and then, with a second launcher while Redis is unreachable."""
    parent = tmp_path_factory.mktemp("hard")
    line = write_small_run(
        parent,
        data=write_rows(parent),
        reward={"verifier": "moody:reward"},
        # Redis comes back as another server: until a session would have expired, nothing is leased.
        store={"url": server.url, "heartbeat_seconds": 1.0, "session_ttl_seconds": 5.0},
        generator={"replicas": 1},
        trainer={"train_steps": 12},
        evaluation={"before_and_after": False},
    )
    launcher = line.start("up", str(line.run_file))
    try:
        until(lambda: len(line.json_lines("metrics.jsonl")) >= 1, "a train step", launcher)
        server.kill()
        second = line.run("up", str(line.run_file))
        server.start()
        output, _ = launcher.communicate(timeout=2 * WAIT_SECONDS)
    finally:
        if launcher.poll() is None:
            launcher.send_signal(signal.SIGINT)
            output, _ = launcher.communicate(timeout=WAIT_SECONDS)
    return line, subprocess.CompletedProcess([], launcher.returncode, output, ""), second


@pytest.mark.long
def test_a_run_with_a_moody_verifier_a_lost_redis_and_a_second_launcher_loses_nothing(hard_run: HardRun) -> None:
    line, done, second = hard_run
    assert done.returncode == 0, done.stdout
    audit = json.loads((line.folder / "audit.json").read_text())
    assert audit["green"], audit
    assert not audit["lost"]
    assert not audit["trained_twice"]
    assert [step["train_step"] for step in line.json_lines("metrics.jsonl")] == list(range(1, 13))
    assert "redis_restarted" in (line.folder / "logs" / "trainer-0.log").read_text()
    assert second.returncode == 2
    assert "another launcher" in second.stderr


@pytest.mark.long
def test_values_that_are_no_numbers_are_named_and_never_trained_on(hard_run: HardRun) -> None:
    line, _, _ = hard_run
    log = (line.folder / "logs" / "reward-0.log").read_text()
    assert "moody:reward: returned nan, expected a finite number" in log
    assert "moody:reward: returned '1.0' (str), expected a finite number" in log
    assert sum(step["batch"]["unscored_trajectories"] for step in line.json_lines("metrics.jsonl")) == 0


@pytest.mark.long
def test_a_finished_run_goes_back_when_it_is_next_started_and_to_no_unknown_version(hard_run: HardRun) -> None:
    line, _, _ = hard_run
    unknown = line.run("rollback", str(line.folder), "--version", "99")
    assert unknown.returncode == 2
    assert "policy version 99 has not been announced" in unknown.stderr
    known = line.run("rollback", str(line.folder), "--version", "10")
    assert known.returncode == 0, known.stderr
    assert "rollback to policy version 10 requested" in known.stdout
    again = line.run("up", str(line.run_file))
    assert again.returncode == 0, again.stdout
    (manifest,) = line.folder.glob("checkpoints/policies/*r1/manifest.json")
    made = json.loads(manifest.read_text())
    assert (made["policy_version"], made["train_step"], made["parent"]) == (13, 12, 10)
