"""Common behaviour of all commands: errors, stops and missing packages."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
import typer

from rollmesh.cli.common import EXIT_STOPPED, clear_errors, heavy_module, run_async, shutdown_event
from rollmesh.errors import ConfigError
from rollmesh.file_writes import write_text
from rollmesh.launcher.local_mesh import Interrupted


def test_a_package_that_is_missing_is_named_with_what_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "rollmesh.trainer.learner.policy_trainer", raising=False)
    with pytest.raises(ConfigError, match=r"the trainer needs the package torch: .* pip install 'rollmesh\[local\]'"):
        heavy_module("rollmesh.trainer.learner.policy_trainer", "the trainer")


def test_a_module_of_our_own_that_is_missing_is_a_bug_and_keeps_its_trace() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"rollmesh\.absent"):
        heavy_module("rollmesh.absent", "the absent service")


@pytest.mark.parametrize("stop", [Interrupted("stopped while waiting"), asyncio.CancelledError()])
def test_a_command_that_a_person_stopped_ends_with_the_status_of_ctrl_c(stop: BaseException) -> None:
    async def main() -> None:
        raise stop

    with pytest.raises(typer.Exit) as ended:
        run_async(main)
    assert ended.value.exit_code == EXIT_STOPPED


def test_an_error_on_purpose_is_one_message_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        raise ConfigError("folder=[runs]/demo: no such folder")

    with pytest.raises(typer.Exit) as ended:
        run_async(main)
    assert ended.value.exit_code == 2
    assert capsys.readouterr().err == "error folder=[runs]/demo: no such folder\n"


def test_a_failed_write_is_one_message_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, clear_errors():
        write_text(Path("/dev/full"), "more than a full disk takes")
    assert ended.value.exit_code == 2
    assert capsys.readouterr().err == "error [Errno 28] No space left on device: '/dev/full'\n"


def test_ctrl_c_before_a_command_has_its_event_loop_ends_it_without_a_trace() -> None:
    with pytest.raises(typer.Exit) as ended, clear_errors():
        raise KeyboardInterrupt
    assert ended.value.exit_code == EXIT_STOPPED


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_stop_is_asked_for_once_and_the_second_one_cancels(number: signal.Signals) -> None:
    waiting = asyncio.Event()

    async def command() -> None:
        shutdown = shutdown_event()
        os.kill(os.getpid(), number)
        await asyncio.wait_for(shutdown.wait(), 60)
        waiting.set()
        await asyncio.Event().wait()  # drains, and does not come to an end

    # Under nohup the tests inherit an ignored SIGHUP, which commands respect.
    inherited = signal.signal(number, signal.SIG_DFL)
    try:
        task = asyncio.create_task(command())
        await asyncio.wait_for(waiting.wait(), 60)
        assert not task.done()
        os.kill(os.getpid(), number)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 60)
    finally:
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().remove_signal_handler(each)
        signal.signal(number, inherited)
