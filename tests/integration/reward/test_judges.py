"""Replies of a judge that its client cannot read, through the whole service."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from rollmesh.types import OutcomeKind
from rollmesh.wire.reward_client import RewardClient

from .reward_bench import Answers, make_config, running_service

REPLIES = {
    "gzip": ("content-encoding: gzip\r\n", b"plain", "DecodingError"),
    "large": ("", b'{"score": %s}' % (b"1" * 400), "OverflowError"),
    "deep": ("", b"[" * 200_000, "RecursionError"),
    "name": ("", rb'{"score": 1, "parts": {"\ud800": 1}}', "half of a surrogate pair"),
}


async def judge(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    request = (await reader.readuntil(b"\r\n\r\n")).lower()
    size = int(request.partition(b"content-length: ")[2].split()[0])
    answer = json.loads(await reader.readexactly(size))["response"]
    header, body, _ = REPLIES.get(answer, ("", b'{"score": 0.5}', ""))
    head = f"HTTP/1.1 200 OK\r\nconnection: close\r\n{header}content-length: {len(body)}\r\n\r\n".encode()
    writer.write(head + body)
    await writer.drain()
    writer.close()


async def test_an_odd_reply_of_a_judge_costs_its_answer_alone(tmp_path: Path) -> None:
    async with await asyncio.start_server(judge, "127.0.0.1", 0) as server:
        options = {"url": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "retries": 0}
        config = make_config(tmp_path, verifier="http_judge", options=options, workers=1)
        answers = Answers(config)
        async with running_service(config), RewardClient(config) as client:
            *odd, plain = await client.score([answers.trajectory(text) for text in [*REPLIES, "plain"]])
    assert (plain.kind, plain.value) == (OutcomeKind.SCORED, 0.5)
    for outcome, (_, _, cause) in zip(odd, REPLIES.values(), strict=True):
        assert outcome.kind is OutcomeKind.VERIFIER_ERROR
        assert cause in outcome.message


async def test_the_pool_and_a_judge_read_what_follows_the_thought(tmp_path: Path) -> None:
    async with await asyncio.start_server(judge, "127.0.0.1", 0) as server:
        options = {"url": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "retries": 0}
        source = {"type": "jsonl", "path": "unused", "verifier_field": "by"}
        reward = {"verifier": "http_judge", "options": options, "workers": 1, "answer_after": "</think>"}
        config = make_config(tmp_path, source, **reward)
        answers = Answers(config)
        async with running_service(config), RewardClient(config) as client:
            judged, chosen = await client.score(
                [
                    answers.trajectory("<think>gzip</think>plain"),
                    answers.trajectory("<think>Is it C?</think>B", {"answer": "B"}, "choice"),
                ]
            )
    assert (judged.kind, judged.value, chosen.value) == (OutcomeKind.SCORED, 0.5, 1.0)
