"""The client of reward services: coalesced calls, retries, deadlines, and the choice among services."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from rollmesh.errors import RewardUnavailable
from rollmesh.runtime.grpc import create_server
from rollmesh.runtime.health import Waits
from rollmesh.runtime.metrics import Metrics
from rollmesh.types import OutcomeKind
from rollmesh.v1 import reward_service_pb2 as pb
from rollmesh.v1 import reward_service_pb2_grpc as stubs
from rollmesh.v1 import trajectory_pb2
from rollmesh.wire.scoring_client import RewardClient
from rollmesh.worker.trajectory_scoring import TrajectoryScorer
from rollmesh.worker.worker_metrics import WorkerMetrics

from .reward_bench import IN_TIME_SECONDS, WAIT_SECONDS, Answers, gate, make_config, running_service

LIMITS = (IN_TIME_SECONDS, 3 * IN_TIME_SECONDS, 9 * IN_TIME_SECONDS)
"""Deadlines of a call that meets its deadline; a longer one when a machine that stalls came late to the call."""


class CountingService(stubs.RewardServiceServicer):
    """A reward service that notes its calls and fails when told to."""

    def __init__(
        self,
        failures: list[grpc.StatusCode] | None = None,
        answer_count: int | None = None,
        hangs_after: int | None = None,
        breaks_after: int | None = None,
    ) -> None:
        self.calls: list[int] = []
        self._failures = failures or []
        self._answer_count = answer_count
        self._hangs_after = hangs_after
        self._breaks_after = breaks_after

    async def Score(self, request: pb.ScoreRequest, context: Any) -> AsyncIterator[pb.ScoreResponse]:
        self.calls.append(len(request.items))
        if self._failures:
            await context.abort(self._failures.pop(0), "told to fail")
        count = len(request.items) if self._answer_count is None else self._answer_count
        # The last item is answered first: the index says whose outcome it is.
        for answered, index in enumerate(reversed(range(count))):
            if answered == self._hangs_after:
                await asyncio.Event().wait()
            if answered == self._breaks_after:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "told to break")
            outcome = trajectory_pb2.RewardOutcome(kind=1, value=float(len(request.items[index].response_ids.data)))
            yield pb.ScoreResponse(item_index=index, outcome=outcome)


@asynccontextmanager
async def client_of(
    service: CountingService, tmp_path: Path, *, deadline_seconds: float = WAIT_SECONDS
) -> AsyncIterator[tuple[RewardClient, Answers]]:
    config = make_config(tmp_path)
    server = create_server()
    stubs.add_RewardServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with RewardClient(config, addresses=lambda: [address], deadline_seconds=deadline_seconds) as client:
            yield client, Answers(config)
    finally:
        await server.stop(None)


async def test_calls_of_one_tick_travel_together_and_come_back_to_their_callers(tmp_path: Path) -> None:
    service = CountingService()
    async with client_of(service, tmp_path) as (client, answers):
        calls = [client.score([answers.trajectory("x" * n)]) for n in range(1, 151)]
        outcomes = [each[0] for each in await asyncio.gather(*calls)]
    assert sorted(service.calls) == [22, 64, 64]
    assert [o.value for o in outcomes] == [4.0 * n for n in range(1, 151)]


async def test_an_answer_does_not_wait_for_the_slowest_one_of_its_call(tmp_path: Path) -> None:
    config = make_config(tmp_path, verifier="poisonous:verify")
    answers = Answers(config)
    with gate() as held:
        async with running_service(config), RewardClient(config) as client:
            await client.score([answers.trajectory("value 0")])
            slow = asyncio.create_task(client.score([answers.trajectory(held.answer)]))
            quick = asyncio.create_task(client.score([answers.trajectory("value 1")]))
            assert (await quick)[0].value == 1.0
            assert not slow.done()
            held.open()
            assert (await slow)[0].value == 1.0


async def test_a_call_that_outlasts_its_deadline_keeps_the_outcomes_that_it_brought(tmp_path: Path) -> None:
    """Or a batch with more time-outs than fit into the deadline would be scored from its start again and again."""
    for seconds in LIMITS:
        async with client_of(CountingService(hangs_after=2), tmp_path, deadline_seconds=seconds) as (client, answers):
            calls = [client.score([answers.trajectory("x" * n)]) for n in range(1, 6)]
            first = await asyncio.gather(*calls, return_exceptions=True)
        errors = [isinstance(result, RewardUnavailable) for result in first]
        if sum(errors) == 3:
            break
    assert errors == [True, True, True, False, False]
    assert [result[0].value for result in first[3:]] == [16.0, 20.0]  # type: ignore[index]


async def test_only_what_a_broken_call_left_open_is_sent_again(tmp_path: Path) -> None:
    service = CountingService(breaks_after=2)
    async with client_of(service, tmp_path) as (client, answers):
        calls = [client.score([answers.trajectory("x" * n)]) for n in range(1, 6)]
        assert [result[0].value for result in await asyncio.gather(*calls)] == [4.0, 8.0, 12.0, 16.0, 20.0]
    assert service.calls == [5, 3, 1]


async def test_large_answers_are_spread_over_calls(tmp_path: Path) -> None:
    service = CountingService()
    async with client_of(service, tmp_path) as (client, answers):
        await client.score([answers.trajectory("x" * 1_000_000)] * 5)
    assert sorted(service.calls) == [1, 2, 2]


async def test_an_unreachable_or_full_service_is_tried_again(tmp_path: Path) -> None:
    service = CountingService([grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED])
    async with client_of(service, tmp_path) as (client, answers):
        assert (await client.score([answers.trajectory("abc")]))[0].value == 12.0
    assert service.calls == [1, 1, 1]


@pytest.mark.parametrize(
    ("make_service", "message"),
    [
        (lambda: CountingService([grpc.StatusCode.INVALID_ARGUMENT]), "INVALID_ARGUMENT: told to fail"),
        (lambda: CountingService(answer_count=0), "returned 0 outcomes for 1 answers"),
        (
            lambda: CountingService([grpc.StatusCode.UNAVAILABLE] * 99),
            "no service answered within LIMIT s; UNAVAILABLE",
        ),
        (
            lambda: CountingService([grpc.StatusCode.UNAVAILABLE], hangs_after=0),
            "no service answered within .*; UNAVAILABLE",
        ),
        (
            lambda: CountingService(hangs_after=0),
            "no service answered within LIMIT s; DEADLINE_EXCEEDED: 127.0.0.1:.* did not answer",
        ),
    ],
)
async def test_a_service_that_cannot_answer_is_an_error_of_rollmesh(
    tmp_path: Path, make_service: Callable[[], CountingService], message: str
) -> None:
    for seconds in LIMITS:
        wanted = message.replace("LIMIT", f"{seconds:g}")
        async with client_of(make_service(), tmp_path, deadline_seconds=seconds) as (client, answers):
            with pytest.raises(RewardUnavailable) as caught:
                await client.score([answers.trajectory("abc")])
        if re.search(wanted, str(caught.value)):
            break
    assert caught.match(wanted)


async def test_without_a_service_the_client_waits_until_the_deadline_or_until_one_comes(tmp_path: Path) -> None:
    config = make_config(tmp_path, verifier="poisonous:verify")
    answers = Answers(config)
    async with RewardClient(config, deadline_seconds=0.3) as client:
        with pytest.raises(RewardUnavailable, match=r"within 0\.3 s; none is registered"):
            await client.score([answers.trajectory("value 1")])
    waits = Waits()
    async with RewardClient(config, waits=waits) as client:
        early = asyncio.create_task(client.score([answers.trajectory("value 1")]))
        async with asyncio.timeout(WAIT_SECONDS):
            while waits.text() != "reward service: none is registered":
                await asyncio.sleep(0.01)
        async with running_service(config):
            assert (await early)[0].value == 1.0
    assert waits.text() == ""


async def test_answers_without_a_reward_show_the_error_of_the_verifier_until_one_has_a_reward(
    tmp_path: Path,
) -> None:
    config = make_config(tmp_path, verifier="poisonous:verify")
    answers, waits = Answers(config), Waits()
    async with running_service(config), RewardClient(config) as client:
        scorer = TrajectoryScorer(client, config.reward, 1000, WorkerMetrics(Metrics("rollout")), waits)
        for answer in ("raise", "value 1", "raise"):
            await scorer.score(answers.trajectory(answer))
            assert waits.text() == ""  # one among others is no wait
        async with asyncio.timeout(WAIT_SECONDS):
            while not waits.text().startswith("an answer has no reward (verifier_error): "):
                await asyncio.sleep(0.1)
                scored = await scorer.score(answers.trajectory("raise"))
                assert scored.outcome.kind is OutcomeKind.VERIFIER_ERROR
        assert (await scorer.score(answers.trajectory("value 1"))).shaped_reward == 1.0
    assert waits.text() == ""


async def test_closing_the_client_ends_its_calls_with_an_error(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    answers = Answers(config)
    async with RewardClient(config) as client:
        call = asyncio.create_task(client.score([answers.trajectory("value 1")]))
        await asyncio.sleep(0.05)
    with pytest.raises(RewardUnavailable, match="closed"):
        await call


async def test_calls_go_to_the_least_busy_service_and_survive_the_loss_of_one(tmp_path: Path) -> None:
    config = make_config(tmp_path, verifier="poisonous:verify", workers=1)
    answers = Answers(config)
    with gate() as held:
        async with running_service(config, 0) as first, RewardClient(config) as client:
            async with running_service(config, 1) as second:
                assert first.grpc != second.grpc
                slow = asyncio.create_task(client.score([answers.trajectory(held.answer)]))
                await held.begun()
                assert (await client.score([answers.trajectory("value 1")]))[0].value == 1.0
                assert not slow.done(), "the other service was free"
                held.open()
                assert (await slow)[0].value == 1.0
            outcomes = await asyncio.gather(*(client.score([answers.trajectory("value 2")]) for _ in range(5)))
            assert {o[0].value for o in outcomes} == {2.0}
