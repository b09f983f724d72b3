import asyncio
import itertools
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rollmesh.config import load_run_config, write_run_config
from rollmesh.config.load import secret_environment
from rollmesh.config.recipes import recipe_file
from rollmesh.launcher.supervisor import ServiceSpec, Supervisor, start_process
from rollmesh.runtime.lifecycle import EXIT_CONFIG, EXIT_UNFINISHED

from ...kit.waiting import reached


def spec(tmp_path: Path, script: str, index: int = 0, **options: object) -> ServiceSpec:
    command = [sys.executable, "-u", "-c", script]
    log = tmp_path / f"worker-{index}.log"
    return ServiceSpec(service="worker", index=index, command=command, environment={}, log_file=log, **options)


def real_service(error: str, log_format: str = "json") -> str:
    """A service that ends with an error of rollmesh."""
    return f"""
from rollmesh import errors
from rollmesh.config.services import TelemetryConfig
from rollmesh.runtime.lifecycle import run_service
from rollmesh.runtime.logging import configure_logging

async def main(shutdown):
    raise errors.{error}

configure_logging(TelemetryConfig(log_format="{log_format}"), service="trainer-0", run="demo")
raise SystemExit(run_service(main))
"""


def says(folder: Path, index: int, word: str, times: int = 1) -> bool:
    log = folder / f"worker-{index}.log"
    return log.exists() and log.read_text().count(word) >= times


async def failure(child: ServiceSpec, restart_limit: int = 20, notes: list[str] | None = None) -> tuple[str, dict]:
    """The reason with which a supervisor gives a child up, and the restarts before."""
    supervisor = Supervisor(restart_limit, (notes if notes is not None else []).append)
    supervisor.start(child)
    reason = await asyncio.wait_for(supervisor.failed, 60)
    await supervisor.kill_all()
    return reason, supervisor.restart_counts()


async def test_a_killed_child_comes_back_and_keeps_its_log(tmp_path: Path) -> None:
    notes: list[str] = []
    supervisor = Supervisor(restart_limit=5, note=notes.append)
    supervisor.start(spec(tmp_path, "import signal; print('up'); signal.pause()"))
    await reached(lambda: says(tmp_path, 0, "up") and supervisor.pid("worker-0") is not None)
    pid = supervisor.pid("worker-0")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await reached(lambda: says(tmp_path, 0, "up", 2))
    assert supervisor.restart_counts() == {"worker-0": 1}
    assert "killed by SIGKILL" in notes[0] and "up" not in notes[0], "its last line is no reason"
    await supervisor.stop(["worker"])
    assert supervisor.pid("worker-0") is None


async def test_a_service_reads_the_resolved_value_and_not_the_variable_that_an_option_has_overridden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLMESH_TRAINER__LEARNING_RATE", "1e-5")
    monkeypatch.setenv("ROLLMESH_STORE__PASSWORD", "of another run")
    monkeypatch.setenv("ROLLMESH_CODE_FOLDER", "beside")
    overrides = ["trainer.learning_rate=1.0e-4", "store.password=ours"]
    config = load_run_config(recipe_file("countdown", "demo.yaml"), overrides)
    write_run_config(config, tmp_path / "config.yaml")
    script = (
        "import os; from rollmesh.config import load_run_config; run = load_run_config('config.yaml');"
        "print(run.trainer.learning_rate, run.store.password.get_secret_value(), os.environ['ROLLMESH_CODE_FOLDER'])"
    )
    monkeypatch.chdir(tmp_path)
    child = spec(tmp_path, script)
    process = await start_process(replace(child, environment=secret_environment(config)))
    assert await process.wait() == 0, child.log_file.read_text()
    assert child.log_file.read_text() == "0.0001 ours beside\n"


async def test_a_child_that_dies_at_once_is_started_again_after_ever_longer_pauses(tmp_path: Path) -> None:
    reason, _ = await failure(spec(tmp_path, "import time; print('at', time.time()); raise SystemExit(1)"), 2)
    lines = (tmp_path / "worker-0.log").read_text().splitlines()
    first, second, third = (float(line.removeprefix("at ")) for line in lines if line.startswith("at "))
    assert second - first >= 0.5 and third - second >= 1.0
    assert "worker-0 ended with status 1" in reason and lines[-1] in reason, "the end of its log"


async def test_every_restart_is_noted_with_its_number_and_the_last_error(tmp_path: Path) -> None:
    notes: list[str] = []
    line = {"event": "service_failed", "error": "EngineError", "message": "out of\nmemory", "passing": False}
    reason, _ = await failure(spec(tmp_path, f"import json; print(json.dumps({line})); raise SystemExit(1)"), 2, notes)
    assert notes == [
        "worker-0 ended with status 1, restart 1 of 2 in 0.5 s: EngineError: out of memory",
        "worker-0 ended with status 1, restart 2 of 2 in 1.0 s: EngineError: out of memory",
    ]
    assert "worker-0 ended with status 1, 3 times" in reason


@pytest.mark.parametrize("passing", [False, True])
async def test_starts_that_take_minutes_reach_the_restart_limit_unless_they_fail_for_want_of_redis(
    tmp_path: Path, passing: bool
) -> None:
    """Every look at this clock is eleven minutes after the last one: no two restarts are within ten minutes."""
    minutes = itertools.count(0, 11)
    supervisor = Supervisor(restart_limit=1, clock=lambda: 60.0 * next(minutes))
    line = {"event": "service_failed", "error": "StoreUnavailable", "message": "loading", "passing": passing}
    supervisor.start(spec(tmp_path, f"import json; print(json.dumps({line})); raise SystemExit(1)"))
    await reached(lambda: supervisor.failed.done() or says(tmp_path, 0, "loading", 4))
    assert supervisor.failed.done() is not passing
    await supervisor.kill_all()


async def test_restarts_are_forgiven_after_ten_minutes_of_service(tmp_path: Path) -> None:
    supervisor = Supervisor(restart_limit=1)
    supervisor.start(spec(tmp_path, "import signal; print('up'); signal.pause()"))
    for starts in range(1, 4):
        await reached(lambda starts=starts: says(tmp_path, 0, "up", starts))
        # The line may be there before the supervisor knows the process.
        await reached(lambda: supervisor.pid("worker-0") is not None)
        supervisor.count_service(["worker-0"], 600.0)
        pid = supervisor.pid("worker-0")
        assert pid is not None, "0 would be every process of this test run"
        os.kill(pid, signal.SIGKILL)
    await reached(lambda: says(tmp_path, 0, "up", 4))
    assert not supervisor.failed.done()
    await supervisor.kill_all()


async def test_a_child_that_names_a_wrong_setting_fails_the_run_at_once(tmp_path: Path) -> None:
    line = {"event": "service_failed", "error": "DataError", "message": "rows.jsonl:2: field 'prompt' is missing"}
    script = f"import json; print('loading'); print(json.dumps({line})); raise SystemExit({EXIT_CONFIG})"
    reason, restarts = await failure(spec(tmp_path, script))
    assert "worker-0 cannot continue: DataError: rows.jsonl:2: field 'prompt' is missing" in reason
    assert "loading" not in reason
    assert str(tmp_path / "worker-0.log") in reason
    assert restarts == {"worker-0": 0}


async def test_a_child_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    supervisor = Supervisor(restart_limit=0)
    script = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); signal.pause(); signal.pause()"
    supervisor.start(spec(tmp_path, script, grace_seconds=0.2))
    await reached(lambda: says(tmp_path, 0, "up"))
    await asyncio.wait_for(supervisor.stop(["worker"]), 60)
    assert supervisor.pid("worker-0") is None
    assert not supervisor.failed.done()


async def test_a_one_shot_child_that_ends_well_is_not_restarted(tmp_path: Path) -> None:
    supervisor = Supervisor(restart_limit=0)
    supervisor.start(spec(tmp_path, "print('done')", one_shot=True))
    await reached(lambda: says(tmp_path, 0, "done") and supervisor.pid("worker-0") is None)
    assert supervisor.restart_counts() == {"worker-0": 0}
    assert not supervisor.failed.done()


async def test_a_child_that_cannot_even_be_started_fails_the_run_instead_of_hanging_it(tmp_path: Path) -> None:
    reason, _ = await failure(replace(spec(tmp_path, ""), command=[str(tmp_path / "absent")]))
    assert "worker-0 cannot be started" in reason and "absent" in reason


@pytest.mark.parametrize("status", [0, EXIT_UNFINISHED])
async def test_a_one_shot_child_that_was_asked_to_stop_too_early_is_started_again(tmp_path: Path, status: int) -> None:
    supervisor = Supervisor(restart_limit=1)
    supervisor.start(spec(tmp_path, f"print('done'); raise SystemExit({status})", one_shot=True))
    await reached(lambda: supervisor.finished("worker-0"))
    supervisor.start_again("worker-0")
    assert not supervisor.finished("worker-0")
    await reached(lambda: supervisor.finished("worker-0"))
    assert (tmp_path / "worker-0.log").read_text().count("done") == 2
    supervisor.start_again("worker-0")
    assert "worker-0 ended with status 0, 2 times" in await asyncio.wait_for(supervisor.failed, 60)


FAILURE = {"event": "service_failed", "error": "SessionLost", "message": "another trainer has taken over run demo"}


async def test_an_error_after_which_no_start_helps_is_found_behind_other_lines_and_another_status(
    tmp_path: Path,
) -> None:
    """torchrun ends with a status of its own and writes a summary after the rank's last lines."""
    script = f"import json; print(json.dumps({FAILURE})); print('rank 0 failed, sending SIGTERM'); raise SystemExit(1)"
    reason, restarts = await failure(spec(tmp_path, script, final_errors=frozenset({"SessionLost"})))
    assert "worker-0 cannot continue: SessionLost: another trainer has taken over run demo" in reason
    assert restarts == {"worker-0": 0}


async def test_an_earlier_start_is_not_blamed_for_the_end_of_a_later_one(tmp_path: Path) -> None:
    log = tmp_path / "worker-0.log"
    log.write_text(json.dumps(FAILURE) + "\n")
    child = spec(tmp_path, "raise SystemExit('out of memory')", final_errors=frozenset({"SessionLost"}))
    reason, _ = await failure(child, 0)
    assert "worker-0 ended with status 1" in reason and "out of memory" in reason
    assert "taken over" not in reason


async def test_a_damaged_checkpoint_ends_the_run_at_once_and_a_missing_one_is_tried_again(tmp_path: Path) -> None:
    """Bytes that differ from the promised ones differ at every start; a shared folder may only lag behind."""

    def script(reason: str) -> str:
        return real_service(f"CheckpointError('batches/3.pb: sha256 differs', reason={reason!r})")

    for reason in ("tampered", "mismatch"):
        said, _ = await failure(spec(tmp_path, script(reason)))
        assert "worker-0 cannot continue: CheckpointError: batches/3.pb: sha256 differs" in said
    notes: list[str] = []
    await failure(spec(tmp_path, script("missing")), 1, notes)
    assert len(notes) == 1


@pytest.mark.parametrize("log_format", ["json", "console"])
async def test_the_words_of_a_real_service_are_understood_in_both_log_formats(tmp_path: Path, log_format: str) -> None:
    script = real_service("SessionLost('another trainer has taken over run demo')", log_format)
    reason, _ = await failure(spec(tmp_path, script, final_errors=frozenset({"SessionLost"})))
    assert "worker-0 cannot continue: SessionLost" in reason
    assert "another trainer has taken over run demo" in reason


# Children that retire while the others run

_STAYS = "import signal; print('up'); signal.pause()"
_DRAINS = """
import signal
def leave(*_):
    print('draining')
    signal.sigwait([signal.SIGUSR1])
    print('drained')
    raise SystemExit(0)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
signal.signal(signal.SIGTERM, leave)
print('up')
signal.pause()
"""


async def test_a_retired_child_is_forgotten_and_not_restarted_while_the_others_stay(tmp_path: Path) -> None:
    supervisor = Supervisor(restart_limit=0)
    for index in range(2):
        supervisor.start(spec(tmp_path, _STAYS, index))
    await reached(lambda: says(tmp_path, 0, "up") and says(tmp_path, 1, "up"))
    await supervisor.retire("worker-1")
    assert supervisor.indexes("worker") == ([0], [])
    assert supervisor.pid("worker-0") is not None
    assert supervisor.restart_counts() == {"worker-0": 0}
    assert not supervisor.failed.done()
    supervisor.start(spec(tmp_path, _STAYS, 1))
    await reached(lambda: says(tmp_path, 1, "up", times=2))
    await supervisor.stop(["worker"])


async def test_a_child_that_is_retired_before_its_process_exists_never_comes_up(tmp_path: Path) -> None:
    supervisor = Supervisor(restart_limit=0)
    supervisor.start(spec(tmp_path, _STAYS))
    await supervisor.retire("worker-0")
    assert supervisor.indexes("worker") == ([], [])
    assert not says(tmp_path, 0, "up")
    await supervisor.kill_all()


async def test_an_orderly_stop_waits_for_a_child_that_is_being_retired(tmp_path: Path) -> None:
    supervisor = Supervisor(restart_limit=0)
    supervisor.start(spec(tmp_path, _DRAINS, grace_seconds=3600.0))
    await reached(lambda: says(tmp_path, 0, "up"))
    pid = supervisor.pid("worker-0")
    assert pid is not None
    retirement = supervisor.retire("worker-0")
    assert supervisor.retire("worker-0") is retirement
    await reached(lambda: says(tmp_path, 0, "draining"))
    stop = asyncio.ensure_future(supervisor.stop(["worker"]))
    await asyncio.sleep(0)
    assert not stop.done() and supervisor.indexes("worker") == ([0], [0])
    os.kill(pid, signal.SIGUSR1)
    await asyncio.wait_for(stop, 60)
    assert says(tmp_path, 0, "drained")
    assert supervisor.indexes("worker") == ([], [])


async def test_killing_everything_ends_a_retirement_too(tmp_path: Path) -> None:
    supervisor = Supervisor(restart_limit=0)
    supervisor.start(spec(tmp_path, _DRAINS, grace_seconds=3600.0))
    await reached(lambda: says(tmp_path, 0, "up"))
    retirement = supervisor.retire("worker-0")
    await reached(lambda: says(tmp_path, 0, "draining"))
    await asyncio.wait_for(supervisor.kill_all(), 60)
    assert retirement.done() and not says(tmp_path, 0, "drained")
