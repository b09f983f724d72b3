"""A teacher over gRPC: its columns, its description, what it refuses, and its end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollmesh.errors import EngineError
from rollmesh.runtime.grpc import create_server
from rollmesh.runtime.metrics import Metrics
from rollmesh.teacher.teacher_engine import ScoreRequest, TokenScores
from rollmesh.teacher.teacher_metrics import TeacherMetrics
from rollmesh.teacher.teacher_model import manifest_digest
from rollmesh.teacher.teacher_service import ServedTeacher, TeacherService
from rollmesh.text import Tokenizer
from rollmesh.v1 import teacher_service_pb2 as pb
from rollmesh.v1 import teacher_service_pb2_grpc as stubs
from rollmesh.wire.codec import teacher_from_pb

from .teacher_bench import (
    CONTEXT,
    TEACHER,
    VOCAB,
    WAIT_SECONDS,
    connected,
    make_config,
    random_sequences,
    reference,
    running_service,
    scored,
)


@pytest.mark.parametrize(("temperature", "budget"), [(1.0, 8192), (0.7, 100)])
async def test_columns_equal_those_of_plain_transformers(tmp_path: Path, temperature: float, budget: int) -> None:
    config = make_config(tmp_path, temperature, tokens_per_microbatch=budget)
    folder, sequences, top_k = tmp_path / "teacher", random_sequences(9), 5
    async with running_service(config) as endpoint, connected(endpoint.grpc) as stub:
        calls = (sequences[:4], sequences[4:])
        parts = await asyncio.gather(*(scored(stub, call, temperature, top_k) for call in calls))
    answers = [answer for part in parts for answer in part]
    for (ids, prompt), answer in zip(sequences, answers, strict=True):
        column = teacher_from_pb(answer.column)
        assert (answer.message, column.teacher) == ("", TEACHER)
        assert column.manifest_digest == manifest_digest(folder)
        assert column.top_ids is not None and column.top_logprobs is not None
        rows = reference(folder, ids, prompt, temperature)
        picked = rows[np.arange(len(rows)), ids[prompt:]]
        np.testing.assert_allclose(column.logprobs, picked, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(column.top_ids, np.argsort(-rows, axis=-1)[:, :top_k])
        np.testing.assert_allclose(column.top_logprobs, -np.sort(-rows, axis=-1)[:, :top_k], rtol=0, atol=1e-5)


async def test_a_sequence_without_scores_has_a_reason_and_its_neighbours_have_scores(tmp_path: Path) -> None:
    ids = np.arange(8, dtype=np.int32)
    wrong = ids.copy()
    wrong[3] = VOCAB
    long = np.zeros(CONTEXT + 1, np.int32)
    async with running_service(make_config(tmp_path)) as endpoint, connected(endpoint.grpc) as stub:
        cases = [(ids, 3), (wrong, 3), (ids, 0), (ids, 9), (long, 3), (ids, 8)]
        good, foreign, no_prompt, no_answer, too_long, empty = await scored(stub, cases)
        described = await stub.Describe(pb.DescribeTeacherRequest())
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
    config = make_config(tmp_path)
    file = tmp_path / "teacher" / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], 3e38)  # finite, its products are not
    save_file(weights, file, {"format": "pt"})
    async with running_service(config) as endpoint, connected(endpoint.grpc) as stub:
        (answer,) = await scored(stub, random_sequences(1))
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
    service = TeacherService(_SERVED, _Held(), TeacherMetrics(Metrics("teacher"), TEACHER))
    with pytest.raises(grpc.aio.AioRpcError, match=r"INVALID_ARGUMENT") as caught:
        await _one_call(service, pb.ScoreTokensRequest(**request_))
    assert (caught.value.details() or "").startswith(details)


_SERVED = ServedTeacher(
    name=TEACHER,
    manifest_digest="m",
    vocabulary_digest="v",
    vocab_size=VOCAB,
    policy_vocab_size=VOCAB,
    context_token_count=CONTEXT,
)


class _Held:
    """An engine that never ends a sequence."""

    def __init__(self) -> None:
        self.failed = asyncio.get_running_loop().create_future()
        self.count = 0

    async def score(self, request: ScoreRequest) -> TokenScores:
        self.count += 1
        await asyncio.Event().wait()
        raise EngineError("never")


async def _one_call(service: TeacherService, request: pb.ScoreTokensRequest) -> list[pb.ScoreTokensResponse]:
    server = create_server()
    stubs.add_TeacherServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with connected(f"127.0.0.1:{port}") as stub:
            return [answer async for answer in stub.Score(request, timeout=WAIT_SECONDS)]
    finally:
        await server.stop(0)
