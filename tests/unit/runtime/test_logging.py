"""Structured logs, and what libraries log."""

import io
import json
import logging
import subprocess
import sys
import threading
from typing import Any

import pytest

from rollmesh.config.services import TelemetryConfig
from rollmesh.runtime import logging as logs
from rollmesh.runtime.logging import _LibraryLogHandler
from rollmesh.runtime.spans import TraceContext, traceparent_of, traceparent_of_step


@pytest.fixture
def log() -> Any:
    """configure(**telemetry) -> lines(): what was logged since."""

    def configure(**telemetry: Any):
        stream = io.StringIO()
        logs.configure_logging(TelemetryConfig(**telemetry), service="rollout-0", run="demo", stream=stream)
        return lambda: [json.loads(line) for line in stream.getvalue().splitlines()]

    return configure


def trace_of(traceparent: str) -> str:
    place = TraceContext.parse(traceparent)
    return f"{place.trace_id:032x}"


def test_a_line_carries_run_service_and_what_it_is_about(log) -> None:
    lines = log()
    logger = logs.get_logger("worker")
    logger.info("started")
    logs.note_policy_version(7)
    with logs.lines_about("e0-1.2"):
        logger.warning("attempt_failed", message="why")
    logger.info("policy_refused", policy_version=8)
    started, failed, refused = lines()
    for line in (started, failed, refused):
        assert (line["run"], line["service"], line["component"]) == ("demo", "rollout-0", "worker")
    assert "policy_version" not in started
    assert (failed["trajectory"], failed["policy_version"], failed["level"]) == ("e0-1.2", 7, "warning")
    assert "trace_id" not in failed
    assert refused["policy_version"] == 8
    assert "trajectory" not in refused


def test_logs_that_are_configured_again_drop_the_policy_version(log) -> None:
    log()
    logs.note_policy_version(7)
    lines = log()
    logs.get_logger("worker").info("started")
    (started,) = lines()
    assert "policy_version" not in started


def test_a_log_on_a_full_disk_ends_no_service() -> None:
    script = """
from rollmesh.config.services import TelemetryConfig
from rollmesh.runtime.logging import configure_logging, get_logger
configure_logging(TelemetryConfig(), service="trainer-0", run="demo")
for number in range(40):
    get_logger("any").info("line", number=number, filler="x" * 500)
print("done")
"""
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=full, text=True)
    assert done.stdout == "done\n"


def test_a_line_of_a_librarys_thread_names_run_and_service_too(log) -> None:
    lines = log()
    thread = threading.Thread(target=lambda: logs.get_logger("objects").warning("object_store_retry"))
    thread.start()
    thread.join(10)
    (line,) = lines()
    assert (line["run"], line["service"]) == ("demo", "rollout-0")


def test_lines_lead_to_their_trace_while_traces_are_recorded(log) -> None:
    lines = log(otlp_endpoint="http://collector:4318")
    logger = logs.get_logger("any")
    logger.info("started")
    logger.info("no_reward", trajectory="e0-1.2")
    logger.info("batch_cut", train_step=3)
    started, reward, cut = lines()
    assert "trace_id" not in started
    assert reward["trace_id"] == trace_of(traceparent_of("demo", "e0-1.2"))
    assert cut["trace_id"] == trace_of(traceparent_of_step("demo", 3))


def test_equal_lines_of_a_library_share_one_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.Logger("uvicorn.error")
    logger.addHandler(_LibraryLogHandler())
    for _ in range(1_000):
        logger.warning("Invalid HTTP request received.")
    logger.warning("another line")
    lines = capsys.readouterr().out.splitlines()
    # The loop takes milliseconds; on a machine that stalls, a second may begin in it.
    assert 2 <= len(lines) < 20
    assert "Invalid HTTP request" in lines[0] and "another line" in lines[-1]
