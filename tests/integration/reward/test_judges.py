"""Judges through the whole service: replies that cannot be read, many calls at once, time-outs, keys."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollmesh.types import OutcomeKind, RewardOutcome
from rollmesh.wire.scoring_client import RewardClient

from ...kit.judge_server import JudgeServer, Reply, judge_server
from .reward_bench import IN_TIME_SECONDS, WAIT_SECONDS, Answers, make_config, running_service

AT_ONCE = 8
REPLIES = {
    "gzip": ({"content-encoding": "gzip"}, b"plain", "DecodingError"),
    "large": ({}, b'{"score": %s}' % (b"1" * 400), "OverflowError"),
    "deep": ({}, b"[" * 200_000, "RecursionError"),
    "name": ({}, rb'{"score": 1, "parts": {"\ud800": 1}}', "half of a surrogate pair"),
}


@pytest.fixture
async def judge() -> AsyncIterator[JudgeServer]:
    def answer(number: int, body: dict[str, Any]) -> Reply:
        headers, content, _ = REPLIES.get(body["response"], ({}, b'{"score": 0.5}', ""))
        return 200, headers, content

    async with judge_server() as server:
        server.answer = answer
        yield server


async def test_an_odd_reply_of_a_judge_costs_its_answer_alone_and_no_thought_is_read(
    tmp_path: Path, judge: JudgeServer
) -> None:
    source = {"type": "jsonl", "path": "unused", "verifier_field": "by"}
    judged = {"verifier": "http_judge", "options": {"url": judge.url, "retries": 0}}
    config = make_config(tmp_path, source, workers=1, answer_after="@@", **judged)
    answers = Answers(config)
    read = [answers.trajectory(f"name@@{text}") for text in [*REPLIES, "plain"]]
    exact = answers.trajectory("Is it C?@@B", {"answer": "B"}, "exact")
    async with running_service(config), RewardClient(config) as client:
        *odd, plain, same = await client.score([*read, exact])
    assert (plain.kind, plain.value, same.value) == (OutcomeKind.SCORED, 0.5, 1.0)
    for outcome, (_, _, cause) in zip(odd, REPLIES.values(), strict=True):
        assert outcome.kind is OutcomeKind.VERIFIER_ERROR
        assert cause in outcome.message


async def test_a_judge_is_asked_for_many_answers_at_once(tmp_path: Path, judge: JudgeServer) -> None:
    judge.answers_together = AT_ONCE
    judged = {"verifier": "http_judge", "options": {"url": judge.url}, "workers": 1}
    config = make_config(tmp_path, **judged)
    answers = Answers(config)
    async with running_service(config), RewardClient(config) as client:
        outcomes = await client.score([answers.trajectory(str(n)) for n in range(40)])
    assert judge.most_at_once >= AT_ONCE, "no call waited for the one before it"
    assert {(o.kind, o.value) for o in outcomes} == {(OutcomeKind.SCORED, 0.5)}
    assert {request["prompt"] for request in judge.requests} == {"question"}
    # A service of its own: the answers above may take their time.
    judge.answer = lambda number, body: WAIT_SECONDS
    config = make_config(tmp_path, timeout_seconds=IN_TIME_SECONDS, **judged)
    async with running_service(config), RewardClient(config) as client:
        (late,) = await client.score([answers.trajectory("slow")])
    assert late.kind is OutcomeKind.TIMED_OUT


async def test_a_judge_gets_a_key_that_no_verifier_process_may_read(
    tmp_path: Path, judge: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLMESH_GATEWAY__TOKEN", "judge-key")
    options = {"url": judge.url, "api_key_env": "ROLLMESH_GATEWAY__TOKEN"}
    config = make_config(tmp_path, verifier="http_judge", options=options, workers=1)
    async with running_service(config), RewardClient(config) as client:
        (outcome,) = await client.score([Answers(config).trajectory("an answer")])
    assert outcome == RewardOutcome(kind=OutcomeKind.SCORED, value=0.5)
    assert judge.headers[0]["authorization"] == "Bearer judge-key"
