"""The HTTP judge against a real server on this machine."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rollmesh.errors import VerifierError
from rollmesh.tasks.verifiers.http_judge import HttpJudgeVerifier
from rollmesh.tasks.verifiers.verifier_protocol import AsyncVerifier, build_verifier, checked_reward

from ...kit.judge_server import JudgeServer, Reply, judge_server


@pytest.fixture
async def judge() -> AsyncIterator[JudgeServer]:
    async with judge_server() as server:
        yield server


def chat_reply(content: str | None, finish_reason: str | None = "stop") -> Reply:
    choice = {"message": {"content": content}, "finish_reason": finish_reason}
    return 200, {}, json.dumps({"choices": [choice]}).encode()


async def judged(
    judge: JudgeServer, response: str = "r", metadata: dict[str, Any] | None = None, **options: Any
) -> Any:
    verifier = HttpJudgeVerifier(judge.url, **options)
    try:
        reward = await verifier.verify_async(response, metadata or {"prompt": "p", "answer": "a", "level": 2})
        return checked_reward(reward, "http_judge")
    finally:
        await verifier.aclose()


async def test_the_judge_sees_the_answer_and_its_score_and_parts_come_back(judge: JudgeServer) -> None:
    judge.answer = lambda number, body: (200, {}, b'{"score": 0.5, "parts": {"style": 0.25}}')
    reward = await judged(judge, "my answer", scale=2.0)
    assert judge.requests == [{"prompt": "p", "response": "my answer", "metadata": {"answer": "a", "level": 2}}]
    assert (reward.value, dict(reward.parts)) == (1.0, {"style": 0.25})


async def test_a_chat_model_is_asked_with_the_template_and_its_last_number_counts(judge: JudgeServer) -> None:
    judge.answer = lambda number, body: chat_reply("I compare 3 and 4.\nScore: 7.5", None)
    template = "Q: {prompt}\nA: {response}\nTruth: {answer} {unknown}"
    reward = await judged(judge, "{prompt} braces", format="chat", model="m", template=template, scale=0.1)
    assert judge.requests[0]["messages"][0]["content"] == "Q: p\nA: {prompt} braces\nTruth: a {unknown}"
    rest = {name: value for name, value in judge.requests[0].items() if name != "messages"}
    assert rest == {"model": "m", "temperature": 0}
    assert reward.value == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("content", "score"),
    [
        ("Score: 8/10", 8.0),
        ("**8**/10", 8.0),
        ("8 / 10.", 8.0),
        ("I give 7.5 out of 10", 7.5),
        ("Out of 10: 6", 6.0),
        ("Rating (1-10): [[7]]", 7.0),
        ("1,000 points", 1000.0),
        ("-3", -3.0),
    ],
)
async def test_the_scale_that_a_chat_model_names_is_not_its_score(
    judge: JudgeServer, content: str, score: float
) -> None:
    judge.answer = lambda number, body: chat_reply(content)
    assert (await judged(judge, format="chat", model="m", template="{response}")).value == score


async def test_the_run_file_says_what_a_chat_model_is_sent_and_the_template_takes_every_field(
    judge: JudgeServer,
) -> None:
    judge.answer = lambda number, body: chat_reply("1")
    options = {"temperature": None, "max_tokens": 64, "chat_template_kwargs": {"enable_thinking": False}}
    metadata = {"prompt": "p", "answer": 2.5e-6, "rubric": ["short", "polite"]}
    await judged(judge, "r", metadata, format="chat", model="m", template="{response}|{answer}|{rubric}", **options)
    assert judge.requests == [
        {
            "model": "m",
            "max_tokens": 64,
            "chat_template_kwargs": {"enable_thinking": False},
            "messages": [{"role": "user", "content": 'r|0.0000025|["short", "polite"]'}],
        }
    ]


@pytest.mark.parametrize(
    ("content", "finish_reason", "score"),
    [
        ("<think>Maybe 3.</think> Score: 8", "stop", 8.0),
        ("Maybe 3.</think> Score: 8", None, 8.0),
        ("[THINK]Maybe 3.[/THINK] Score: 8", "eos", 8.0),
        ("<score>8</score><reasoning>Clear.</reasoning>", "stop", 8.0),
        ("Score: 8", "length", None),
        ("Score: 8", "MAX_TOKENS", None),
        ("Score: 8", "model_length", None),
        ("Score: 8", "abort", None),
        ("[THINK]Maybe 3, or 8", "stop", None),
        ("<thinking>Maybe 3</thinking> It is 4. <thinking>No, 8", "stop", None),
        ("Score: 8", "content_filter", None),
        ("<think>Maybe 3, or 8", "stop", None),
        ("<think>So it is 3.</think>", "stop", None),
        (None, "stop", None),
    ],
)
async def test_a_reply_that_was_cut_off_or_ends_in_a_thought_gives_no_number(
    judge: JudgeServer, content: str | None, finish_reason: str | None, score: float | None
) -> None:
    judge.answer = lambda number, body: chat_reply(content, finish_reason)
    if score is not None:
        assert (await judged(judge, format="chat", model="m", template="{response}")).value == score
        return
    with pytest.raises(VerifierError, match="no score in the reply"):
        await judged(judge, format="chat", model="m", template="{response}")


async def test_overload_and_server_errors_are_tried_again(judge: JudgeServer) -> None:
    replies: list[Reply] = [(503, {}, b"busy"), (429, {"Retry-After": "0.05"}, b""), (200, {}, b'{"score": 1}')]
    judge.answer = lambda number, body: replies[number - 1]
    assert (await judged(judge)).value == 1.0
    assert len(judge.requests) == 3


@pytest.mark.parametrize(
    ("reply", "message", "requests"),
    [((500, {}, b"broken"), "status 500: 'broken'", 2), ((401, {}, b"no key"), "status 401: 'no key'", 1)],
)
async def test_retries_end_and_a_refusal_is_not_tried_again(
    judge: JudgeServer, reply: Reply, message: str, requests: int
) -> None:
    judge.answer = lambda number, body: reply
    with pytest.raises(VerifierError, match=message):
        await judged(judge, retries=1)
    assert len(judge.requests) == requests


@pytest.mark.parametrize("reply", [30.0, (429, {"Retry-After": "3600"}, b"")])
async def test_a_judge_that_is_slow_or_asks_to_wait_longer_than_the_limit_is_a_time_out_not_a_zero(
    judge: JudgeServer, reply: Reply | float
) -> None:
    judge.answer = lambda number, body: reply
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        await judged(judge, timeout_seconds=0.3)
    assert time.monotonic() - start < 20.0, "it did not wait for the answer"


async def test_a_judge_that_is_not_there_is_an_error(judge: JudgeServer) -> None:
    judge.url = "http://127.0.0.1:1/score"
    with pytest.raises(VerifierError, match="ConnectError"):
        await judged(judge, retries=1)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"garbage",
        b"[]",
        b'{"value": 1}',
        b'{"score": "1"}',
        b'{"score": true}',
        b'{"score": null}',
        b'{"score": NaN}',
        b'{"score": 1e999}',
        b'{"score": %s}' % (b"1" * 400),
        b"[" * 200_000,
        b'{"score": 1, "parts": {"a": "b"}}',
        b'{"score": 1, "parts": [1]}',
        b"x" * (2 << 20),
    ],
)
async def test_a_reply_without_a_number_is_an_error_never_a_zero(judge: JudgeServer, body: bytes) -> None:
    judge.answer = lambda number, _: (200, {}, body)
    with pytest.raises(VerifierError):
        await judged(judge)


async def test_a_reply_that_cannot_be_decompressed_is_tried_again_and_then_an_error(judge: JudgeServer) -> None:
    replies: list[Reply] = [(200, {"Content-Encoding": "gzip"}, b'{"score": 1}'), (200, {}, b'{"score": 1}')]
    judge.answer = lambda number, _: replies[number - 1]
    assert (await judged(judge)).value == 1.0
    judge.answer = lambda number, _: replies[0]
    with pytest.raises(VerifierError, match="DecodingError"):
        await judged(judge, retries=1)
    assert len(judge.requests) == 4


async def test_the_key_comes_from_the_environment(judge: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TEST_KEY", "secret")
    await judged(judge, api_key_env="JUDGE_TEST_KEY", headers={"x-team": "mesh"})
    assert judge.headers[0]["authorization"] == "Bearer secret"
    assert judge.headers[0]["x-team"] == "mesh"


async def test_many_answers_are_judged_at_once_up_to_the_concurrency(judge: JudgeServer) -> None:
    judge.answer = lambda number, body: 0.1  # time for a ninth one to come
    judge.answers_together = 8
    verifier = HttpJudgeVerifier(judge.url, concurrency=8)
    async with asyncio.timeout(20):  # no eight at once, no answer
        await asyncio.gather(*(verifier.verify_async(str(n), {}) for n in range(32)))
    await verifier.aclose()
    assert judge.most_at_once == 8


async def test_the_blocking_form_gives_the_same(judge: JudgeServer) -> None:
    verifier = build_verifier("http_judge", {"url": judge.url})
    assert isinstance(verifier, AsyncVerifier)
    reward = await asyncio.to_thread(verifier.verify, "r", {"prompt": "p"})
    assert checked_reward(reward, "http_judge").value == 1.0
    assert not verifier.timeout_means_wrong
