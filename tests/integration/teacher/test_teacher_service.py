"""A teacher over gRPC: its columns, its description, what it refuses, and its end."""

import asyncio
import math
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollmesh.config.load import write_run_config
from rollmesh.errors import ConfigError, EngineError
from rollmesh.preflight.run_checks import check_run
from rollmesh.runtime.endpoints import Endpoint, read_endpoints
from rollmesh.runtime.grpc import create_server
from rollmesh.runtime.metrics import Metrics
from rollmesh.teacher.main import serve
from rollmesh.teacher.teacher_engine import ScoreRequest, TokenScores
from rollmesh.teacher.teacher_model import TeacherModel, manifest_digest
from rollmesh.teacher.teacher_service import TeacherMetrics, TeacherService
from rollmesh.text import Tokenizer
from rollmesh.v1 import teacher_service_pb2 as pb
from rollmesh.v1 import teacher_service_pb2_grpc as stubs
from rollmesh.wire.codec import teacher_from_pb, tensor_to_pb
from rollmesh.wire.teacher_client import check_teacher

from ...contract.contract_kit import KEY, StandIn
from ...kit.run_files import run_config
from ...kit.waiting import reached
from ...sglang_cpu.server import START_SECONDS
from .teacher_bench import (
    CONTEXT,
    STAND_IN,
    TEACHER,
    VOCAB,
    WAIT_SECONDS,
    assert_columns,
    connected,
    last_hidden,
    make_config,
    random_sequences,
    real_server,
    running_service,
    scored,
    write_teacher,
)


@pytest.mark.parametrize(("temperature", "budget"), [(1.0, 8192), (0.7, 100)])
async def test_columns_equal_those_of_plain_transformers(tmp_path: Path, temperature: float, budget: int) -> None:
    config = make_config(tmp_path, temperature, tokens_per_microbatch=budget)
    sequences, top_k = random_sequences(9), 5
    async with running_service(config) as endpoint, connected(endpoint.grpc) as stub:
        calls = (sequences[:4], sequences[4:])
        parts = await asyncio.gather(*(scored(stub, call, temperature, top_k) for call in calls))
    answers = [answer for part in parts for answer in part]
    assert_columns(tmp_path / "teacher", sequences, answers, temperature, top_k)


async def test_a_server_of_a_teacher_gives_the_same_columns_and_its_loss_ends_the_process(tmp_path: Path) -> None:
    await _served_columns(tmp_path, STAND_IN)


@pytest.mark.long
@pytest.mark.timeout(1500)
async def test_the_real_sglang_gives_the_same_columns(tmp_path: Path) -> None:
    await _served_columns(tmp_path, real_server())


async def _served_columns(folder: Path, sglang: dict[str, Any]) -> None:
    config = make_config(folder, engine="sglang", sglang=sglang, top_k=3)
    sequences = random_sequences(9)
    with pytest.raises(EngineError, match="the SGLang server ended with status"):
        async with running_service(config, START_SECONDS) as endpoint, connected(endpoint.grpc) as stub:
            assert_columns(folder / "teacher", sequences, await scored(stub, sequences, 1.0, 3), 1.0, 3)
            again = await scored(stub, sequences[::-1], 1.0, 3)  # with what they begin with in the cache
            assert_columns(folder / "teacher", sequences[::-1], again, 1.0, 3)
            with pytest.raises(grpc.aio.AioRpcError, match="scores at temperature 1 only"):
                await scored(stub, sequences, 0.7)
            (server,) = (p for p in psutil.Process().children() if str(folder / "teacher") in p.cmdline())
            server.kill()
            await reached(lambda: not read_endpoints(Path(config.folder)), "the end of the teacher")


@pytest.mark.long
async def test_a_server_at_a_url_keeps_its_weights_and_other_ones_end_the_process(tmp_path: Path) -> None:
    teacher = write_teacher(tmp_path / "teacher", 2)
    server = StandIn(teacher, tmp_path / "server.log")
    try:
        at_url = {"engine": "sglang", "device": "auto", "sglang": {"url": server.url, "admin_key": KEY}}
        config, sequences = make_config(tmp_path, **at_url), random_sequences(3)
        with pytest.raises(EngineError, match=r"weights have changed: .*policy"):
            async with running_service(config) as endpoint, connected(endpoint.grpc) as stub:
                assert_columns(teacher, sequences, await scored(stub, sequences, 1.0, 3), 1.0, 3)
                body = {"model_path": str(tmp_path / "policy"), "weight_version": "default"}
                async with httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}) as client:
                    (await client.post(f"{server.url}/update_weights_from_disk", json=body)).raise_for_status()
                await reached(lambda: not read_endpoints(Path(config.folder)), "the end of the teacher")
        with pytest.raises(ConfigError, match=r"teachers.wise.sglang.url=.*policy, expected .*teacher; start it with"):
            await serve(config, 0, asyncio.Event(), name=TEACHER)
    finally:
        server.stop()


async def test_a_sequence_without_scores_has_a_reason_and_its_neighbours_have_scores(tmp_path: Path) -> None:
    ids = np.arange(8, dtype=np.int32)
    wrong = ids.copy()
    wrong[3] = VOCAB
    long = np.zeros(CONTEXT + 1, np.int32)
    async with running_service(make_config(tmp_path)) as endpoint, connected(endpoint.grpc) as stub:
        cases = [(ids, 3), (wrong, 3), (ids, 0), (ids, 9), (long, 3), (ids, 8)]
        good, foreign, no_prompt, no_answer, too_long, empty = await scored(stub, cases)
        described = await stub.DescribeTeacher(pb.DescribeTeacherRequest())
        async with httpx.AsyncClient() as client:
            metrics = (await client.get(f"http://{endpoint.admin}/metrics")).text
    assert len(teacher_from_pb(good.column).logprobs) == 5
    assert foreign.message == f"token_ids[3]={VOCAB} is outside the teacher's vocabulary of {VOCAB} tokens"
    assert no_prompt.message == "prompt_token_count=0: expected 1 to 8 (token_ids)"
    assert no_answer.message == "prompt_token_count=9: expected 1 to 8 (token_ids)"
    assert too_long.message == f"token_ids: {CONTEXT + 1} tokens, the teacher's context has {CONTEXT}"
    assert not too_long.HasField("column")
    assert len(teacher_from_pb(empty.column).logprobs) == 0
    assert described == pb.DescribeTeacherResponse(
        teacher=TEACHER,
        manifest_digest=manifest_digest(tmp_path / "teacher"),
        vocabulary_digest=Tokenizer(tmp_path / "policy").vocabulary_digest,
        context_token_count=CONTEXT,
    )
    for line in ("sequences_total", "errors_total", "scored_tokens_total", "score_seconds_count"):
        value = {"sequences_total": 6.0, "errors_total": 4.0, "scored_tokens_total": 5.0}.get(line, 2.0)
        assert f'rollmesh_teacher_{line}{{teacher="{TEACHER}"}} {value}' in metrics


async def test_logprobs_that_are_not_finite_are_a_reason_and_never_a_number(tmp_path: Path) -> None:
    """The logit of a token is so large after one sequence that the others have no probability."""
    folder = write_teacher(tmp_path / "teacher", 2, tie_word_embeddings=False)
    good, bad = (np.array(ids, np.int32) for ids in ([9, 1, 5, 7, 2, 4, 8], [3, 9, 9, 4, 6, 1]))
    trial = np.arange(8, dtype=np.int32)  # a model that gives no scores of it does not start
    wanted = [(trial, range(7), -1.0), (good, range(3, 6), -1.0), (bad, range(3, 4), 1.0)]
    states = torch.cat([last_hidden(folder, ids)[list(rows)] for ids, rows, _ in wanted])
    signs = torch.cat([torch.full((len(rows), 1), sign) for _, rows, sign in wanted])
    head = load_file(folder / "model.safetensors")
    head["lm_head.weight"][VOCAB - 1] = 1e36 * torch.linalg.lstsq(states, signs).solution[:, 0]
    save_file(head, folder / "model.safetensors", {"format": "pt"})
    async with running_service(make_config(tmp_path)) as endpoint, connected(endpoint.grpc) as stub:
        neighbour, answer = await scored(stub, [(good, 4), (bad, 4)])
    assert len(teacher_from_pb(neighbour.column).logprobs) == 3
    assert answer.message == "logprobs: the teacher's log-probabilities are not finite"
    assert not answer.HasField("column")


@pytest.mark.parametrize(
    ("request_", "details"),
    [
        ({"temperature": 0.0}, "temperature=0.0: expected at least"),
        ({"temperature": float("nan")}, "temperature=nan: expected at least"),
        ({"temperature": 1.0, "top_k": VOCAB + 1}, f"top_k={VOCAB + 1}: expected 0 to {VOCAB}"),
        ({"temperature": 1.0, "top_k": -1}, "top_k=-1: expected 0 to"),
    ],
)
async def test_settings_without_scores_are_refused_by_name(
    tmp_path: Path, request_: dict[str, Any], details: str
) -> None:
    service = TeacherService(_SERVED, "m", _Held(), TeacherMetrics(Metrics("teacher"), TEACHER))
    with pytest.raises(grpc.aio.AioRpcError, match=r"INVALID_ARGUMENT") as caught:
        await _one_call(service, pb.ScoreTokensRequest(**request_))
    assert (caught.value.details() or "").startswith(details)


_SERVED = TeacherModel(
    name=TEACHER,
    folder=Path("teacher"),
    vocabulary_digest="v",
    vocab_size=VOCAB,
    policy_vocab_size=VOCAB,
    context_token_count=CONTEXT,
)


class _Held:
    """An engine that fails when told to."""

    def __init__(self) -> None:
        self.failed = asyncio.get_running_loop().create_future()
        self.count = 0
        self.end = asyncio.Event()

    async def score(self, request: ScoreRequest) -> TokenScores:
        self.count += 1
        await self.end.wait()
        raise EngineError("the model failed")


async def test_a_full_service_refuses_and_says_so(tmp_path: Path) -> None:
    service = TeacherService(_SERVED, "m", _Held(), TeacherMetrics(Metrics("teacher"), TEACHER), most_items=2)
    item = pb.TokenScoreItem(token_ids=tensor_to_pb(np.arange(4, dtype=np.int32)), prompt_token_count=1)
    with pytest.raises(grpc.aio.AioRpcError, match=r"RESOURCE_EXHAUSTED.*items: 0 of 2 are in progress; retry later"):
        await _one_call(service, pb.ScoreTokensRequest(items=[item] * 3, temperature=1.0))


async def test_a_failed_engine_makes_the_service_unavailable(tmp_path: Path) -> None:
    engine = _Held()
    service = TeacherService(_SERVED, "m", engine, TeacherMetrics(Metrics("teacher"), TEACHER))
    item = pb.TokenScoreItem(token_ids=tensor_to_pb(np.arange(4, dtype=np.int32)), prompt_token_count=1)
    call = asyncio.create_task(_one_call(service, pb.ScoreTokensRequest(items=[item], temperature=1.0)))
    await reached(lambda: engine.count == 1, "the sequence in the engine")
    engine.end.set()
    with pytest.raises(grpc.aio.AioRpcError, match=r"UNAVAILABLE.*the model failed"):
        await call


@pytest.mark.parametrize(
    ("teacher", "model", "message"),
    [
        (
            {"model": "no/such"},
            {},
            r"teachers\.wise\.model=no/such: no/such contains no config\.json; download it first",
        ),
        ({}, {"max_position_embeddings": 64}, r"context has 64 tokens, fewer than generator\.max_context_tokens=96"),
        ({}, {"tokens": ["added"], "vocab_size": 257}, r"teachers\.wise\.model=.*: another tokenizer than that of"),
        ({"top_k": 257}, {}, r"teachers\.wise\.top_k=257: more than the 256 tokens of the vocabulary; lower it"),
        (
            {"engine": "sglang", "sglang": {"python": sys.executable}},
            {},
            r"teachers\.wise\.sglang\.python=.*has no SGLang",
        ),
    ],
)
def test_a_teacher_that_does_not_fit_the_run_is_refused_before_the_start(
    tmp_path: Path, teacher: dict[str, Any], model: dict[str, Any], message: str
) -> None:
    write_teacher(tmp_path / "teacher", 2, **model)
    with pytest.raises(ConfigError, match=message):
        check_run(make_config(tmp_path, **teacher), tries_inputs=False)


def test_top_k_whose_scores_exceed_a_message_is_refused() -> None:
    base = "name=a folder=runs/a model.path=m teachers.t.model=m trainer.algorithm.teacher.reverse_kl_coefficient=1"
    config = run_config("teachers.t.top_k=1024 generator.max_context_tokens=65536", base)
    with pytest.raises(ConfigError, match=r"teachers\.t\.top_k=1024: .* exceed a message of 64 MiB; set at most 127"):
        check_teacher(config, "t", "v", math.inf, "v")


def test_an_sglang_teacher_of_a_run_at_another_temperature_is_refused() -> None:
    base = "name=a folder=runs/a model.path=m teachers.t.model=m trainer.algorithm.teacher.reverse_kl_coefficient=1"
    with pytest.raises(
        ConfigError, match=r"teachers\.t\.engine=sglang with rollout\.temperature=0\.7: .* engine=torch"
    ):
        run_config("rollout.temperature=0.7 teachers.t.engine=sglang", base)


async def test_another_model_behind_the_name_of_a_teacher_is_refused_when_the_run_continues(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    async with running_service(config):
        pass
    async with running_service(config):  # the same one
        pass
    shutil.rmtree(tmp_path / "teacher")
    write_teacher(tmp_path / "teacher", 3)
    with pytest.raises(ConfigError, match=r"teachers\.wise\.model=.*: its files have changed since this run began"):
        await serve(config, 0, asyncio.Event(), name=TEACHER)


async def test_a_process_ends_its_sequences_on_sigterm_and_its_successor_is_found(tmp_path: Path) -> None:
    config = make_config(tmp_path, tokens_per_microbatch=100)
    (tmp_path / "run").mkdir()
    write_run_config(config, tmp_path / "run.yaml")
    command = [sys.executable, "-m", "rollmesh.cli.main", "teacher", str(tmp_path / "run.yaml"), TEACHER]
    sequences = random_sequences(30)
    processes: list[asyncio.subprocess.Process] = []

    async def started() -> Endpoint:
        process = await asyncio.create_subprocess_exec(*command)
        processes.append(process)

        def check() -> None:
            assert process.returncode is None

        def found() -> list[Endpoint]:
            return [e for e in read_endpoints(tmp_path / "run", f"teacher-{TEACHER}") if e.pid == process.pid]

        return (await reached(found, "the teacher", WAIT_SECONDS, check=check))[0]

    try:
        async with connected((await started()).grpc) as stub:
            answers = await scored(stub, sequences, 1.0, 3, then=lambda: processes[0].send_signal(signal.SIGTERM))
            assert_columns(tmp_path / "teacher", sequences, answers, 1.0, 3)
        assert await asyncio.wait_for(processes[0].wait(), WAIT_SECONDS) == 0
        async with connected((await started()).grpc) as stub:
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await scored(stub, sequences * 100, 1.0, 3, then=processes[1].kill)
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _one_call(service: TeacherService, request: pb.ScoreTokensRequest) -> list[pb.ScoreTokensResponse]:
    server = create_server()
    stubs.add_TeacherServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with connected(f"127.0.0.1:{port}") as stub:
            return [answer async for answer in stub.ScoreTokens(request, timeout=WAIT_SECONDS)]
    finally:
        await server.stop(0)
