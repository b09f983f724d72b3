"""The life of a service process, its imports, and a collector of traces that does not answer it."""

import asyncio
import gc
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollmesh.config.services import TelemetryConfig
from rollmesh.launcher.supervisor import exit_reason
from rollmesh.runtime.addresses import free_port
from rollmesh.runtime.lifecycle import EXIT_CONFIG, EXIT_UNFINISHED, many_imports
from rollmesh.runtime.logging import configure_logging
from rollmesh.runtime.spans import traceparent_of
from rollmesh.runtime.tracing import recorded_traces

SERVICE = """
import asyncio, sys
from rollmesh import errors
from rollmesh.runtime.lifecycle import run_service

async def main(shutdown):
    if sys.argv[1].endswith("Error") or sys.argv[1] in ("StoreUnavailable", "Unfinished"):
        raise getattr(errors, sys.argv[1])("schedule.pool_size=0: must be at least 1")
    print("up", flush=True)
    await shutdown.wait()
    print("drained", flush=True)
    if sys.argv[1] == "stuck":
        await asyncio.Event().wait()

sys.exit(run_service(main, grace_seconds=float(sys.argv[2])))
"""
SUPERVISED = """
import sys
from rollmesh.runtime.lifecycle import die_with_parent

die_with_parent(int(sys.argv[1]))
print("lives")
"""
THROUGH_ANOTHER = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode % 256)"
CRASHING = """
import asyncio, logging, threading, warnings
import httpx
from rollmesh.config.services import TelemetryConfig
from rollmesh.runtime.health import Health
from rollmesh.runtime.service_host import admin_server
from rollmesh.runtime.lifecycle import run_service
from rollmesh.runtime.logging import capture_foreign_logs, configure_logging
from rollmesh.runtime.metrics import Metrics

configure_logging(TelemetryConfig(), service="reward-0", run="demo")
capture_foreign_logs()

async def forgotten():
    raise ValueError("no task awaits this")

async def main(shutdown):
    logging.getLogger("botocore").warning("two\\nlines")
    warnings.warn("an old call")
    thread = threading.Thread(target=lambda: 1 / 0, name="side")
    thread.start()
    thread.join()
    asyncio.create_task(forgotten())
    async with admin_server(Metrics("reward"), Health(), "127.0.0.1") as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"no HTTP at all\\r\\n\\r\\n")
        await reader.read()
        writer.close()
    raise RuntimeError("the end")

run_service(main)
"""
CYCLE_AT_THE_END = """
import sys
from rollmesh.runtime.lifecycle import own_process

class Cycle:
    def __init__(self):
        self.me = self

    def __del__(self):
        print("collected")

if "own" in sys.argv:
    own_process()
Cycle()
"""


def start(mode: str, grace: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SERVICE, mode, str(grace)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_service_drain_and_exit_zero(number: signal.Signals) -> None:
    with start("well", 10.0) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        os.kill(process.pid, number)
        assert "drained" in process.communicate(timeout=60)[0]
        assert process.returncode == 0


def test_a_service_that_does_not_drain_is_cancelled_after_its_grace() -> None:
    with start("stuck", 0.2) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert "cancelled_after_grace" in process.communicate(timeout=60)[0]
        assert process.returncode == 1


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ("ConfigError", EXIT_CONFIG),
        ("DataError", EXIT_CONFIG),
        ("StoreUnavailable", 1),
        ("Unfinished", EXIT_UNFINISHED),
    ],
)
def test_a_known_error_ends_the_service_with_one_clear_line(error: str, status: int) -> None:
    with start(error, 1.0) as process:
        output = process.communicate(timeout=60)[0]
        assert "schedule.pool_size=0: must be at least 1" in output
        assert "Traceback" not in output
        assert process.returncode == status


@pytest.mark.skipif(sys.platform != "linux", reason="parent death signals are Linux's")
def test_a_service_lives_while_its_launcher_is_an_ancestor_whatever_its_process_id() -> None:
    launcher = str(os.getpid())
    through_another = [THROUGH_ANOTHER, "-c", SUPERVISED, launcher]
    for arguments in ([SUPERVISED, launcher], through_another, [SUPERVISED, "1"]):  # process 1 is everyone's ancestor
        done = subprocess.run([sys.executable, "-c", *arguments], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (0, "lives\n")


@pytest.mark.skipif(sys.platform != "linux", reason="parent death signals are Linux's")
def test_a_service_whose_launcher_is_gone_ends_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait(timeout=60)
    orphan = subprocess.run(
        [sys.executable, "-c", SUPERVISED, str(gone.pid)], capture_output=True, text=True, timeout=60
    )
    assert (orphan.returncode, orphan.stdout) == (-signal.SIGTERM, "")


def test_every_line_of_a_crashing_service_is_an_event_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "reward-0.log"
    with log.open("wb") as stream:
        done = subprocess.run([sys.executable, "-c", CRASHING], stdout=stream, stderr=stream, timeout=60, check=False)
    assert done.returncode == 1
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert all((row["run"], row["service"]) == ("demo", "reward-0") for row in rows)
    messages = {row.get("message") for row in rows if row["event"] == "library_message"}
    assert "two\nlines" in messages
    assert any(text and "an old call" in text for text in messages)
    assert any(text and "Invalid HTTP request" in text for text in messages)
    assert any("no task awaits this" in row.get("exception", "") for row in rows)
    (thread,) = [row for row in rows if row["event"] == "thread_crashed"]
    assert (thread["thread"], thread["error"]) == ("side", "ZeroDivisionError")
    crash = rows[-1]
    assert (crash["event"], crash["error"], crash["message"]) == ("service_crashed", "RuntimeError", "the end")
    assert crash["exception"].startswith("Traceback (most recent call last)")
    shown = exit_reason(log).text.splitlines()
    assert shown[-1].strip() == "RuntimeError: the end", "the launcher shows the traceback as people know it"


def test_nothing_is_collected_during_imports_and_the_collector_works_again_afterwards() -> None:
    assert gc.isenabled()
    frozen = gc.get_freeze_count()
    with pytest.raises(ImportError), many_imports():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    assert gc.get_freeze_count() == frozen, "the garbage of another program's process stays"
    gc.disable()
    try:
        with many_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(("arguments", "collected"), [([], True), (["own"], False)])
def test_a_rollmesh_process_ends_without_a_garbage_collection(arguments: list[str], collected: bool) -> None:
    command = [sys.executable, "-c", CYCLE_AT_THE_END, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ("collected" in done.stdout) is collected


def test_the_sglang_engine_is_imported_without_torch_and_without_sglang():
    code = (
        "import sys, rollmesh.generator.engines.sglang.sglang_engine, rollmesh.generator.engines;"
        "assert not {'torch', 'transformers', 'sglang'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


async def test_an_unreachable_collector_is_logged_once_and_delays_no_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    otel = pytest.importorskip("rollmesh.runtime.otel")
    monkeypatch.setattr(otel, "_EXPORT_SECONDS", 90.0)  # how long the SDK tries again
    config = TelemetryConfig(otlp_endpoint=f"http://127.0.0.1:{free_port()}")
    log = io.StringIO()
    configure_logging(config, service="reward-0", run="run", stream=log)
    async with recorded_traces(config, service="reward", instance="reward-0", run="run") as spans:
        for index in range(20):
            spans.span("score", traceparent_of("run", f"e0-{index}.0")).end()
        async with asyncio.timeout(60.0):
            while "traces_not_delivered" not in log.getvalue():
                await asyncio.sleep(0.05)
        started = time.monotonic()
    assert time.monotonic() - started < 45.0, "the service waits for three seconds, not for the SDK"
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    said = [line for line in lines if line["event"] == "traces_not_delivered"]
    assert said
    assert all(line["level"] == "warning" for line in said)
