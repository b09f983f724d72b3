"""Requests that are small as bytes and large as messages cost the service little more than their bytes."""

from __future__ import annotations

import signal
from pathlib import Path

import grpc
import psutil

from rollmesh.config.load import write_run_config
from rollmesh.runtime.grpc import create_channel
from rollmesh.types import OutcomeKind
from rollmesh.v1 import reward_service_pb2 as pb
from rollmesh.wire.codec import outcome_from_pb

from .reward_bench import WAIT_SECONDS, make_config
from .test_reward_service import published, start_process

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
