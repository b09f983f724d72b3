"""Help pages, replicas in words, and common behaviour of all commands."""

import asyncio
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

import rollmesh
from rollmesh.cli.common import EXIT_STOPPED, clear_errors, heavy_module, run_async, shutdown_event
from rollmesh.cli.main import app
from rollmesh.cli.operations import parse_replicas
from rollmesh.config import RunConfig
from rollmesh.errors import ConfigError
from rollmesh.file_writes import write_text
from rollmesh.launcher.local_mesh import Interrupted

from ...kit.run_files import made_run

ROOT: Any = get_command(app)


def commands(group: Any = ROOT, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every visible command with its words."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *path, name)
        elif not command.hidden:
            yield (*path, name), command


COMMANDS = dict(commands())


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_an_example_that_it_accepts(words: tuple[str, ...]) -> None:
    command = COMMANDS[words]
    line = re.search(r"Example: `rollmesh ([^`]+)`", command.help)
    assert line is not None, command.help
    typed = shlex.split(line[1])
    assert tuple(typed[: len(words)]) == words
    # Parsing alone: a wrong option or number of arguments is an error.
    command.make_context(words[-1], typed[len(words) :])


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_help_page_names_no_type_of_python_and_no_argument_in_double_brackets(words: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(app, [*words, "-h"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert not re.search(r"<(bool|int|float|path|str|list)|\{|list\[|\[\[", shown.stdout), shown.stdout
    assert "Show this message" in shown.stdout


def test_the_list_of_commands_begins_with_up_and_demo() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).stdout
    names = re.findall(r"│ ([a-z][a-z-]+)  ", shown)
    assert names[:2] == ["up", "demo"]
    assert {"config", "dead-letters"} < set(names) == set(ROOT.commands), "none is hidden"
    assert len(names) <= 26
    assert CliRunner().invoke(app, ["--version"]).stdout == f"rollmesh {rollmesh.__version__}\n"


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
    with pytest.raises(typer.Exit) as ended, clear_errors():  # before there is an event loop
        raise KeyboardInterrupt
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


def run(tmp_path: Path, **generator: object) -> RunConfig:
    return made_run(tmp_path, model={"path": str(tmp_path)}, generator=generator)


def test_words_name_services_and_their_replicas(tmp_path: Path) -> None:
    sections = run(tmp_path).model_dump() | {"teachers": {"wise": {"model": "m", "replicas": 0}}}
    sections["trainer"]["algorithm"]["teacher"] = {"reverse_kl_coefficient": 1.0}
    assert parse_replicas(RunConfig.model_validate(sections), ["teacher-wise=2"]) == {"teacher-wise": 2}
    assert parse_replicas(run(tmp_path), ["generator=3", "reward=default"]) == {"generator": 3, "reward": None}


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("generator", "expected SERVICE=N"),
        ("generator=-1", "expected SERVICE=N"),
        ("trainer=2", "launcher.trainer_processes"),
        ("gateway=2", "gateway cannot be scaled"),
        (
            "teacher-wise=2",
            "teacher-wise cannot be scaled: teachers of the run file has none of that name without address",
        ),
        ("generator=1000", "generator=1000: expected 0 to 256"),
    ],
)
def test_a_word_that_cannot_be_met_is_named(tmp_path: Path, word: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parse_replicas(run(tmp_path), [word])


def test_generators_cannot_share_one_sglang_server(tmp_path: Path) -> None:
    config = run(tmp_path, engine="sglang", sglang={"url": "http://127.0.0.1:30000"})
    assert parse_replicas(config, ["generator=1"]) == {"generator": 1}
    with pytest.raises(ConfigError, match="generator=2: generators cannot share the server"):
        parse_replicas(config, ["generator=2"])
