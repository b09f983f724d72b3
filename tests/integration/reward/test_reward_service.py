"""The whole service over gRPC: outcomes, draining, metrics, and the memory that requests take."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest

from rollmesh.config.load import write_run_config
from rollmesh.errors import ConfigError
from rollmesh.reward.main import serve
from rollmesh.reward.reward_service import RewardService
from rollmesh.runtime.endpoints import Endpoint, read_endpoints
from rollmesh.runtime.grpc import create_channel, create_server
from rollmesh.types import OutcomeKind, RewardOutcome
from rollmesh.v1 import reward_service_pb2 as pb
from rollmesh.v1 import reward_service_pb2_grpc as stubs
from rollmesh.wire.codec import outcome_from_pb
from rollmesh.wire.scoring_client import RewardClient

from ...kit.waiting import reached
from .reward_bench import IN_TIME_SECONDS, WAIT_SECONDS, Answers, gate, make_config, running_service

SCORED = OutcomeKind.SCORED


@dataclass(frozen=True)
class OneIsLate:
    """A service that has scored some answers, one of them late."""

    endpoint: Endpoint
    client: RewardClient
    answers: Answers
    outcomes: list[RewardOutcome]


@asynccontextmanager
async def one_is_late(folder: Path, *responses: str) -> AsyncIterator[OneIsLate]:
    """Score answers, one of which never ends. On a machine that stalls another may be late, too: then they are scored
    again by a service with a longer limit."""
    for seconds in (IN_TIME_SECONDS, 3 * IN_TIME_SECONDS, 9 * IN_TIME_SECONDS):
        config = make_config(folder / f"limit-{seconds:g}", verifier="poisonous:verify", timeout_seconds=seconds)
        answers = Answers(config)
        async with running_service(config) as endpoint, RewardClient(config) as client:
            outcomes = await client.score([answers.trajectory(response) for response in responses])
            if [outcome.kind for outcome in outcomes].count(OutcomeKind.TIMED_OUT) == 1:
                yield OneIsLate(endpoint, client, answers, outcomes)
                return
    raise AssertionError(f"no outcome was late, or several were: {outcomes}")


async def test_answers_are_scored_over_grpc_and_errors_are_typed(tmp_path: Path) -> None:
    async with one_is_late(tmp_path, "value 2.5", "parts abc", "nan", "loop", "value -1") as late:
        outcomes, client, answers = late.outcomes, late.client, late.answers
        assert outcomes[0] == RewardOutcome(kind=SCORED, value=2.5)
        assert outcomes[1] == RewardOutcome(kind=SCORED, value=1.0, parts={"a": 0.25, "length": 3.0})
        assert [o.kind for o in outcomes[2:]] == [OutcomeKind.VERIFIER_ERROR, OutcomeKind.TIMED_OUT, SCORED]
        assert await client.score([]) == []
        whole = await client.score([answers.trajectory("metadata", {"n": 21})])
        assert whole[0].value == 42.0, "whole numbers arrive as integers"
        unknown = await client.score([answers.trajectory("x", verifier="nonsense")])
        assert "this run has no verifier 'nonsense'" in unknown[0].message


async def test_rows_choose_among_the_verifiers_when_the_source_says_so(tmp_path: Path) -> None:
    source = {"type": "jsonl", "path": "unused", "verifier_field": "by"}
    config = make_config(tmp_path, source, verifier="exact")
    answers = Answers(config)
    cases = [
        ("math", r"\boxed{\frac{2}{4}}", {"answer": "1/2"}, 1.0),
        ("numeric", "it is 42", {"answer": 42}, 1.0),
        ("countdown", "1 + 2 = 3 ~ 3 = 0 !", {"numbers": [1, 2], "target": 3}, 1.0),
        ("python_code", "def f(x): return x + 1", {"entry_point": "f", "tests": [{"args": [1], "expected": 2}]}, 1.0),
        ("", "same", {"answer": "same"}, 1.0),
    ]
    async with running_service(config), RewardClient(config) as client:
        outcomes = await client.score([answers.trajectory(text, data, name) for name, text, data, _ in cases])
    assert [(o.kind, o.value) for o in outcomes] == [(SCORED, value) for *_, value in cases], outcomes


async def test_a_full_service_refuses_and_says_so(tmp_path: Path) -> None:
    class Never:
        async def score(self, verifier: str, payload: bytes) -> RewardOutcome:
            return RewardOutcome(kind=SCORED, value=1.0)

    server = create_server()
    RewardService(Never(), most_items=2).add_to(server)  # type: ignore[arg-type]
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with create_channel(address) as channel:
        stub = stubs.RewardServiceStub(channel)  # type: ignore[no-untyped-call]
        two = [response.item_index async for response in stub.Score(pb.ScoreRequest(items=[pb.ScoreItem()] * 2))]
        assert sorted(two) == [0, 1]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Score(pb.ScoreRequest(items=[pb.ScoreItem()] * 3)).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await server.stop(None)


async def test_health_and_metrics_tell_what_happened(tmp_path: Path) -> None:
    async with (
        one_is_late(tmp_path, "value 1", "value 2", "nan", "loop") as late,
        httpx.AsyncClient(timeout=WAIT_SECONDS) as http,
    ):
        assert (await http.get(f"http://{late.endpoint.admin}/readyz")).status_code == 200
        assert (await http.get(f"http://{late.endpoint.admin}/healthz")).status_code == 200
        await late.client.score([late.answers.trajectory("x", verifier="nonsense")])
        text = (await http.get(f"http://{late.endpoint.admin}/metrics")).text
    for line in (
        'rollmesh_reward_outcomes_total{kind="scored",verifier="poisonous:verify"} 2.0',
        'rollmesh_reward_outcomes_total{kind="verifier_error",verifier="poisonous:verify"} 1.0',
        'rollmesh_reward_outcomes_total{kind="timed_out",verifier="poisonous:verify"} 1.0',
        'rollmesh_reward_outcomes_total{kind="verifier_error",verifier="unknown"} 1.0',
        'rollmesh_reward_score_seconds_count{verifier="poisonous:verify"} 4.0',
        'rollmesh_reward_workers_replaced_total{reason="timed_out"} 1.0',
        'rollmesh_reward_workers_replaced_total{reason="died"} 0.0',
        'rollmesh_reward_items{state="running"} 0.0',
        'rollmesh_reward_items{state="waiting"} 0.0',
    ):
        assert line in text


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"verifier": "nonsense"}, "reward.verifier: 'nonsense' is not one of exact"),
        ({"verifier": "poisonous:missing"}, "has no 'missing'"),
    ],
)
async def test_a_verifier_that_cannot_be_loaded_ends_the_start_with_its_reason(
    tmp_path: Path, reward: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        await asyncio.wait_for(serve(make_config(tmp_path, **reward), 0, asyncio.Event()), WAIT_SECONDS)


def start_process(config_file: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "rollmesh.cli.main", "reward", str(config_file)])


async def published(folder: Path, process: subprocess.Popen[bytes]) -> Endpoint:
    def check() -> None:
        assert process.poll() is None

    def found() -> list[Endpoint]:
        return [e for e in read_endpoints(folder, "reward") if e.pid == process.pid]

    return (await reached(found, "the service", WAIT_SECONDS, check=check))[0]


async def withdrawn(folder: Path) -> None:
    """Wait until the service has heard that it is to stop: it then takes its address back, and drains."""
    await reached(lambda: not read_endpoints(folder, "reward"), "the end of the service", WAIT_SECONDS)


async def test_sigterm_finishes_what_is_in_the_service_and_kill_leaves_no_process(tmp_path: Path) -> None:
    config = make_config(tmp_path, verifier="poisonous:verify")
    config_file = tmp_path / "run.yaml"
    (tmp_path / "run").mkdir()
    write_run_config(config, config_file)
    answers = Answers(config)
    first = start_process(config_file)
    try:
        await published(Path(config.folder), first)
        async with RewardClient(config) as client:
            with gate() as held:
                late = asyncio.create_task(client.score([answers.trajectory(held.answer)]))
                await held.begun()
                first.send_signal(signal.SIGTERM)
                await withdrawn(Path(config.folder))
                held.open()
                assert (await late)[0].value == 1.0
            assert await asyncio.to_thread(first.wait, WAIT_SECONDS) == 0
            assert not read_endpoints(Path(config.folder), "reward")
            await _kill_in_the_middle(config_file, Path(config.folder), client, answers)
    finally:
        first.kill()
        first.wait()


async def _kill_in_the_middle(config_file: Path, folder: Path, client: RewardClient, answers: Answers) -> None:
    """kill -9 of the service: its workers end with it, and its successor serves the call."""
    second, third = start_process(config_file), None
    try:
        await published(folder, second)
        family = psutil.Process(second.pid).children(recursive=True)
        assert len(family) >= 3, "a template and two workers"
        with gate() as held:
            call = asyncio.create_task(client.score([answers.trajectory(held.answer)]))
            await held.begun()
            second.kill()
            third = start_process(config_file)
            held.open()
            assert (await call)[0].value == 1.0
        gone, alive = await asyncio.to_thread(psutil.wait_procs, family, WAIT_SECONDS)
        assert not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        assert gone or os.geteuid() != 0
    finally:
        for process in (second, third):
            if process is not None:
                process.kill()
                process.wait()


TEN_MEGABYTES = 10 << 20
MOST_GROWTH_BYTES = 200 << 20
"""One such request decoded is 410 MB; bytes on their way and the allocator's own reserves are about 100 MB."""


def field(number: int, content: bytes) -> bytes:
    """One length-delimited field."""
    size, encoded = len(content), bytearray([number << 3 | 2])
    while size > 0x7F:
        encoded.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*encoded, size]) + content


MANY_ITEMS = field(1, b"") * (TEN_MEGABYTES // 2)
ONE_ITEM_OF_MANY_MESSAGES = field(
    1, field(2, field(3, field(1, field(2, field(6, field(1, b"") * (TEN_MEGABYTES // 2))))))
)
"""The metadata of its prompt holds a list of five million values."""
INVALID, FULL = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED
NO_MESSAGE = b"\xff" * TEN_MEGABYTES


async def test_a_request_that_is_refused_leaves_no_memory_behind(tmp_path: Path) -> None:
    config = make_config(tmp_path, verifier="exact")
    (tmp_path / "run").mkdir()
    write_run_config(config, tmp_path / "run.yaml")
    process = start_process(tmp_path / "run.yaml")
    try:
        endpoint = await published(Path(config.folder), process)
        service = psutil.Process(process.pid)
        before = service.memory_info().rss
        async with create_channel(endpoint.grpc) as channel:
            call = channel.unary_stream("/rollmesh.v1.RewardService/Score")  # bytes, as they are
            for request in [MANY_ITEMS] * 4 + [NO_MESSAGE] * 4:
                try:
                    await call(request, timeout=WAIT_SECONDS).read()
                except grpc.aio.AioRpcError as error:
                    assert error.code() in (INVALID, FULL), error
                    assert "items: " in str(error.details())
                else:
                    raise AssertionError("it was not refused")
                assert service.memory_info().rss < before + MOST_GROWTH_BYTES
            for _ in range(2):
                answer = await call(ONE_ITEM_OF_MANY_MESSAGES, timeout=WAIT_SECONDS).read()
                outcome = outcome_from_pb(pb.ScoreResponse.FromString(answer).outcome)
                assert outcome.kind is OutcomeKind.VERIFIER_ERROR, "only its worker process decodes it"
                assert service.memory_info().rss < before + MOST_GROWTH_BYTES
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(WAIT_SECONDS)
