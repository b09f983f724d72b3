"""Start, death and remains of the server as a process of the generator."""

import asyncio
import re
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import psutil
import pytest

from rollmesh.errors import EngineError
from rollmesh.generator.engines.engine_protocol import EngineLost
from rollmesh.generator.engines.sglang.server_process import ServerProcess, relevant_lines
from rollmesh.generator.engines.sglang.sglang_engine import SglangEngine
from rollmesh.types import Chunk

from ...kit.generation import prompt_ids
from ...kit.waiting import reached
from ...sglang_cpu.options import sglang_options
from ...sglang_cpu.server import START_SECONDS
from ..generator.generator_run import make_call, write_model

pytestmark = [pytest.mark.long, pytest.mark.slow]

_TREE = """
import subprocess, sys, time
inner = "import signal, time; signal.signal(15, signal.SIG_IGN); print('inner', flush=True); time.sleep(600)"
children = [subprocess.Popen([sys.executable, "-c", inner]) for _ in range(2)]
print("outer", flush=True)
time.sleep(600)
"""


def tree(pid: int) -> list[psutil.Process]:
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def command(process: psutil.Process) -> str:
    """Its command line; empty for one that has ended, whether or not its parent knows."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def server_of(generator: int) -> psutil.Process:
    """The main process of the server below a generator (the guard is between them)."""
    (guard,) = (p for p in psutil.Process(generator).children() if "orphan_guard.py" in command(p))
    (server,) = guard.children()
    return server


async def test_stopping_ends_the_program_and_all_that_it_started(tmp_path):
    log = tmp_path / "logs" / "server.log"
    process = ServerProcess([sys.executable, "-c", _TREE], {}, log)
    await reached(lambda: log.read_text().count("inner") == 2)
    processes = tree(process.pid)
    assert len(processes) == 4 and process.alive
    await process.stop(5.0)
    await reached(lambda: gone(processes))
    assert not process.alive


async def test_the_end_of_a_program_is_told_with_its_status_and_its_last_lines(tmp_path):
    command = [sys.executable, "-c", "print('line\\n' * 50 + 'out of memory'); raise SystemExit(3)"]
    process = ServerProcess(command, {}, tmp_path / "server.log")
    assert await process.ended() == 3
    assert process.log_tail().endswith("out of memory")
    assert str(tmp_path / "server.log") in process.log_tail()
    assert process.log_tail().count("line\n") < 20
    assert (tmp_path / "server.log").stat().st_mode & 0o077 == 0
    missing = ServerProcess([str(tmp_path / "nothing")], {}, tmp_path / "server.log")
    assert await missing.ended() == 127
    assert "cannot be started" in missing.log_tail() and "out of memory" not in missing.log_tail()


def test_an_exception_tells_more_than_the_noise_after_it():
    trace = ["Traceback (most recent call last):", "  File x", "RuntimeError: index out of range"]
    log = ["start", "Scheduler hit an exception: rank 0", *trace, *[f" - leaked {i}" for i in range(30)], "bye"]
    assert relevant_lines("\n".join(log)).splitlines() == [log[1], *trace, "bye"]
    assert relevant_lines("\n".join(str(i) for i in range(50))).splitlines() == [str(i) for i in range(38, 50)]
    assert relevant_lines("") == ""


async def test_a_killed_owner_leaves_no_process_behind(tmp_path):
    log = tmp_path / "server.log"
    owner = (
        "import asyncio, sys\nfrom pathlib import Path\n"
        "from rollmesh.generator.engines.sglang.server_process import ServerProcess\n"
        "async def main():\n"
        "    process = ServerProcess([sys.executable, '-c', sys.argv[1]], {}, Path(sys.argv[2]))\n"
        "    await process.ended()\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", owner, _TREE, str(log))
    await reached(lambda: log.exists() and log.read_text().count("inner") == 2)
    processes = tree(process.pid)
    assert len(processes) == 5
    process.kill()
    await process.wait()
    await reached(lambda: gone(processes))


async def test_a_server_that_is_not_ready_in_time_is_an_error_that_names_its_log(tmp_path):
    stuck = tmp_path / "sglang"
    stuck.mkdir()
    (stuck / "__init__.py").touch()
    (stuck / "launch_server.py").write_text("import time\nprint('loading shard 1 of 9', flush=True)\ntime.sleep(600)\n")
    model = write_model(tmp_path / "model", 0)
    for seconds in (6, 30, 120):  # until an interpreter has the time to start and to print its line
        engine = _engine(tmp_path, {"PYTHONPATH": str(tmp_path)}, start_timeout_seconds=float(seconds))
        with pytest.raises(EngineLost, match=rf"start_timeout_seconds={seconds}: see (?s:.*)sglang\.log") as caught:
            await engine.start(model, 0)
        await engine.aclose()
        if "loading shard 1 of 9" in str(caught.value):
            break
    assert "loading shard 1 of 9" in str(caught.value)


async def test_a_server_that_dies_as_it_starts_is_an_error_with_its_last_lines(tmp_path):
    broken = tmp_path / "sglang"
    broken.mkdir()
    (broken / "__init__.py").touch()
    (broken / "launch_server.py").write_text("raise SystemExit('no CUDA device')\n")
    engine = _engine(tmp_path, {"PYTHONPATH": str(tmp_path)})
    with pytest.raises(EngineLost, match=r"ended with status 1; (?s:.*)no CUDA device"):
        await engine.start(write_model(tmp_path / "model", 0), 0)
    await engine.aclose()


async def test_a_server_at_a_url_that_never_answers_is_an_error_that_names_it(tmp_path):
    engine = SglangEngine(
        sglang_options(slots=2, max_context_tokens=64, url="http://127.0.0.1:9", start_timeout_seconds=1.0)
    )
    with pytest.raises(EngineLost, match=r"start_timeout_seconds=1: .* http://127\.0\.0\.1:9 cannot be reached"):
        await engine.start(write_model(tmp_path / "model", 0), 0)
    await engine.aclose()


def _engine(folder: Path, environment: dict[str, str], **options: object) -> SglangEngine:
    fields = {"slots": 2, "max_context_tokens": 64, "log_file": folder / "sglang.log", **options}
    return SglangEngine(sglang_options(environment=environment, **fields))


@pytest.mark.parametrize("which", ["stand_in", "real"])
async def test_a_server_killed_among_32_calls_ends_them_after_what_they_have_and_ends_the_generator(
    make_run, request, which
):
    run = await make_run(request.getfixturevalue(which))
    await run.publish(0)
    process = run.start_process(0)
    (record,) = await run.serving(0, seconds=START_SECONDS)
    # In a hundred small slices each, so that the kill comes long before the last of them.
    calls = [make_call(f"t{i}", prompt_ids(i), max_new_token_count=200, chunk_token_count=2) for i in range(32)]
    streams = [run.stream(record, call) for call in calls]

    async def begun() -> bool:
        return all(stream.chunks for stream in streams)

    await run.until("the first chunks of all", begun)
    server_of(process.pid).kill()
    for stream in streams:
        with pytest.raises(EngineError):
            await stream.end()
    for stream in streams:
        assert 0 < len(stream.tokens) < 200
        stream.check_pure(run.models)
    assert await asyncio.to_thread(process.wait, 120) == 1
    await run.until_live("no generator in the registry", lambda live: not live)
    log = (run.folder / "generator-0.log").read_text()
    (last,) = re.findall(r".*service_failed.*", log)
    assert "EngineLost" in last and "ended with status 137" in last and "sglang-0.log" in last


async def _call_under_way(engine: SglangEngine, model: Path) -> AsyncGenerator[Chunk, None] | None:
    """Start the engine and a call, and wait for its first slice. None if a stall of the machine costs the call."""
    try:
        await engine.start(model, 0)
        stream = engine.generate(make_call(context=prompt_ids(0, 4), max_new_token_count=50))
        await anext(stream)
    except EngineError:
        return None
    return stream


async def test_a_server_that_hangs_ends_its_calls_and_the_engine(tmp_path, stand_in):
    model = write_model(tmp_path / "model", 0)
    for seconds in (4, 16, 64):  # until the server has the time to answer before it hangs
        engine = _engine(tmp_path, stand_in["environment"], request_timeout_seconds=float(seconds))
        try:
            stream = await _call_under_way(engine, model)
            if stream is None:
                continue
            server_of(psutil.Process().pid).suspend()
            with pytest.raises(EngineLost, match=f"request_timeout_seconds={seconds}"):
                async for _ in stream:
                    pass
            with pytest.raises(EngineLost):
                engine.status()
            return
        finally:
            await engine.aclose()
    raise AssertionError("no server answered before it was to hang")


async def test_the_real_server_fills_a_context_from_a_cache_of_its_size_and_is_lost_when_its_scheduler_hangs(
    tmp_path, real
):
    """The front of a server with a hung scheduler still answers: only calls without an answer reveal it."""
    limits = {"kv_token_capacity": 64, "max_context_tokens": 64, "request_timeout_seconds": 15.0}
    engine = _engine(tmp_path, real["environment"], python=real["python"], device="cpu", **limits)
    try:
        await engine.start(write_model(tmp_path / "model", 0), 0)
        for length in (20, 60, 63):
            call = make_call(context=prompt_ids(0, length), max_new_token_count=500)
            chunks = [chunk async for chunk in engine.generate(call)]
            assert sum(len(c.token_ids) for c in chunks) == 64 - length
        stream = engine.generate(make_call(context=prompt_ids(0, 4), max_new_token_count=60))
        await anext(stream)
        (scheduler,) = (p for p in tree(server_of(psutil.Process().pid).pid) if "scheduler" in command(p))
        scheduler.suspend()
        await engine._server.api.model_info(60.0)
        with pytest.raises(EngineLost, match=r"request_timeout_seconds=15, nor to any other request"):
            async for _ in stream:
                pass
        with pytest.raises(EngineLost):
            engine.status()
    finally:
        await engine.aclose()
