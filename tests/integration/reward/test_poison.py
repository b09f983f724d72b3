"""Poisonous answers cost their own time and nothing else."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from rollmesh.errors import ConfigError
from rollmesh.reward.reward_service import UNSCORED_ANSWER_LIMIT
from rollmesh.types import OutcomeKind

from ...kit.waiting import reached
from .reward_bench import WAIT_SECONDS, Gate, ScoringBench, gate, make_config, scoring_bench

SCORED, TIMED_OUT, ERROR = OutcomeKind.SCORED, OutcomeKind.TIMED_OUT, OutcomeKind.VERIFIER_ERROR

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="a fork bomb is let loose only under a uid of its own")

POISON = [
    ("loop", TIMED_OUT, "no answer within 1 s"),
    ("stuck", TIMED_OUT, "no answer within 1 s"),
    ("backtrack", TIMED_OUT, "no answer within 1 s"),
    ("sleep 1000", TIMED_OUT, "no answer within 1 s"),
    ("daemon", TIMED_OUT, "no answer within 1 s"),
    pytest.param("fork", TIMED_OUT, "no answer within 1 s", marks=as_root),
    ("memory", ERROR, "MemoryError: the verifier process exceeded"),
    ("crash", ERROR, "ended twice; the last time: killed by signal 11"),
    ("kill", ERROR, "ended twice; the last time: killed by signal 9"),
    ("hard_exit", ERROR, "ended twice; the last time: ended with status 0"),
    ("close", ERROR, "ended twice; the last time: "),
    ("garbage", ERROR, "ended twice; the last time: the worker sent an invalid answer"),
    ("exit", ERROR, "poisonous:verify: SystemExit"),
    ("deep", ERROR, "poisonous:verify: RecursionError"),
    ("raise \x00 oh", ERROR, "poisonous:verify: RuntimeError: on purpose"),
    ("nan", ERROR, "poisonous:verify: returned nan, expected a finite number"),
    ("timeout", TIMED_OUT, "my own limit"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ScoringBench]:
    """One pool for all poison: what one answer breaks, the next one would find."""
    config = make_config(tmp_path_factory.mktemp("shared"), verifier="poisonous:verify", timeout_seconds=1.0)
    async with scoring_bench(config) as bench:
        yield bench


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("answer", "kind", "message"), POISON)
async def test_a_poisonous_answer_gets_a_typed_outcome_and_its_neighbours_their_score(
    shared: ScoringBench, answer: str, kind: OutcomeKind, message: str
) -> None:
    start = time.monotonic()
    # Only poison that ends by the clock is held against it: the others, and the neighbours, may meet a busy machine.
    poison = shared.score_in_time if "no answer within" in message else shared.score
    outcomes = await asyncio.gather(
        shared.score("value 1"), shared.score("value 2"), poison(answer), shared.score("value 3")
    )
    assert time.monotonic() - start < WAIT_SECONDS / 2
    assert [(o.kind, o.value) for o in (*outcomes[:2], outcomes[3])] == [(SCORED, 1.0), (SCORED, 2.0), (SCORED, 3.0)]
    assert outcomes[2].kind is kind
    assert message in outcomes[2].message
    assert outcomes[2].value == 0.0
    assert (await shared.score("value 4")).value == 4.0, "the pool is whole again"
    assert not shared.failures


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "answer",
    ["length " + "x" * 1_000_000, "length " + "(" * 100_000, "print"],
    ids=["megabyte", "deep brackets", "output"],
)
async def test_a_large_answer_is_just_an_answer(shared: ScoringBench, answer: str) -> None:
    outcome = await shared.score(answer)
    assert (outcome.kind, outcome.value) == (SCORED, 1.0 if answer == "print" else len(answer))


async def test_an_answer_without_a_request_is_no_answer_to_the_next_one(tmp_path: Path) -> None:
    async with scoring_bench(make_config(tmp_path, verifier="poisonous:verify", workers=1)) as bench:
        outcomes = await bench.score_all(["forge", "value 1", "value 2"])
        assert [o.value for o in outcomes] == [9.0, 1.0, 2.0]
        assert bench.sample("rollmesh_reward_workers_replaced_total", reason="retired") == 1


async def test_a_time_out_is_wrong_where_the_verifier_says_so_and_marked(tmp_path: Path) -> None:
    config = make_config(tmp_path, verifier="poisonous:wrong_when_late", timeout_seconds=1.0)
    async with scoring_bench(config) as bench:
        for outcome in (await bench.score_in_time("loop"), await bench.score("timeout")):
            assert (outcome.kind, outcome.value, dict(outcome.parts)) == (SCORED, 0.0, {"timed_out": 1.0})
            assert outcome.message
        assert bench.sample("rollmesh_reward_timeouts_scored_wrong_total") == 2
        assert bench.sample("rollmesh_reward_workers_replaced_total", reason="timed_out") == 1


@pytest.mark.parametrize("answer", ["daemon", pytest.param("fork", marks=as_root), "sleep 1000"])
async def test_nothing_that_a_killed_worker_started_lives_on(tmp_path: Path, answer: str) -> None:
    others = _descendants()
    config = make_config(tmp_path, verifier="poisonous:verify", workers=1, timeout_seconds=1.0)
    async with scoring_bench(config) as bench:
        assert (await bench.score_in_time(answer)).kind is TIMED_OUT
        assert (await bench.score("value 1")).value == 1.0
        # The template, its one worker, and who watches over it where workers have uids of their own.
        await _until_as_many_are_left(3 if os.geteuid() == 0 else 2, others)
    await _until_as_many_are_left(0, others)


@as_root
@pytest.mark.parametrize(("answer", "reaper_dies"), [("daemon", False), ("fork", False), ("daemon", True)])
async def test_what_the_workers_of_a_killed_template_have_started_ends_too(
    tmp_path: Path, answer: str, reaper_dies: bool
) -> None:
    config = make_config(tmp_path, verifier="poisonous:verify", workers=1, timeout_seconds=WAIT_SECONDS)
    async with scoring_bench(config) as bench:
        uid = int((await bench.score("uid")).value * 8)
        (worker,) = _of(uid)
        template = worker.parent()
        if reaper_dies:
            (reaper,) = set(template.children()) - {worker}
            reaper.kill()
            await reached(
                lambda: len(set(template.children()) - {worker, reaper}) == 1, "another orphan reaper", WAIT_SECONDS
            )
        poison = asyncio.create_task(bench.score(answer))
        await reached(lambda: len(_of(uid)) >= 3, "the worker's children", WAIT_SECONDS)
        template.kill()
        await reached(lambda: not _of(uid), "their end", WAIT_SECONDS)
        poison.cancel()
        await asyncio.gather(poison, return_exceptions=True)


def _of(uid: int) -> set[psutil.Process]:
    """Every process of a uid."""
    return {p for p in psutil.process_iter(["uids"]) if p.info["uids"] and p.info["uids"].real == uid}


async def _until_as_many_are_left(expected: int, others: set[psutil.Process]) -> None:
    """Wait for all below this process, zombies included; the template adopts what its workers orphan."""

    def is_right() -> bool:
        return len(_descendants() - others) == expected

    await reached(is_right, lambda: str(_descendants() - others), WAIT_SECONDS, pause=0.02)


def _descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


@pytest.fixture
def held() -> Iterator[Gate]:
    with gate() as made:
        yield made


async def test_a_worker_killed_from_outside_costs_no_answer(tmp_path: Path, held: Gate) -> None:
    async with scoring_bench(make_config(tmp_path, verifier="poisonous:verify", workers=1)) as bench:
        pid = int((await bench.score("pid")).value)
        slow = asyncio.create_task(bench.score(held.answer))
        waiting = asyncio.create_task(bench.score("value 7"))
        await held.begun()
        psutil.Process(pid).kill()
        held.open()
        assert [(o.kind, o.value) for o in (await slow, await waiting)] == [(SCORED, 1.0), (SCORED, 7.0)]
        assert int((await bench.score("pid")).value) != pid
        assert bench.sample("rollmesh_reward_workers_replaced_total", reason="died") == 1


async def test_an_idle_worker_killed_from_outside_is_replaced_unseen(tmp_path: Path) -> None:
    async with scoring_bench(make_config(tmp_path, verifier="poisonous:verify", workers=1)) as bench:
        worker = psutil.Process(int((await bench.score("pid")).value))
        worker.kill()
        psutil.wait_procs([worker], timeout=5)
        assert (await bench.score("value 1")).value == 1.0


async def test_a_killed_template_is_replaced_and_no_answer_is_lost(tmp_path: Path, held: Gate) -> None:
    async with scoring_bench(make_config(tmp_path, verifier="poisonous:verify")) as bench:
        pid = int((await bench.score("pid")).value)
        slow = [asyncio.create_task(bench.score(held.answer)) for _ in range(2)]
        await held.begun()
        psutil.Process(pid).parent().kill()  # type: ignore[union-attr]
        held.open()
        assert [(o.kind, o.value) for o in await asyncio.gather(*slow)] == [(SCORED, 1.0)] * 2
        assert (await bench.score("value 1")).value == 1.0


async def test_a_pool_that_cannot_start_workers_any_more_says_so_to_every_answer(tmp_path: Path) -> None:
    config = make_config(tmp_path, verifier="poisonous:verify", workers=1)
    async with scoring_bench(config) as bench:
        pid = int((await bench.score("pid")).value)
        (Path(config.model.path) / "tokenizer.json").unlink()
        worker = psutil.Process(pid)
        template = worker.parent()
        assert template is not None
        for process in (template, worker):
            process.kill()
        outcomes = await asyncio.wait_for(bench.score_all(["value 1", "value 2"]), WAIT_SECONDS)
        assert {o.kind for o in outcomes} == {ERROR}
        assert "the pool has failed" in outcomes[0].message
        assert "tokenizer.json" in str(bench.failures[0])


async def test_what_a_caller_gives_up_on_is_not_started(tmp_path: Path, held: Gate) -> None:
    async with scoring_bench(make_config(tmp_path, verifier="poisonous:verify", workers=1)) as bench:
        running = asyncio.create_task(bench.score(held.answer))
        await held.begun()
        given_up = [asyncio.create_task(bench.score("sleep 1000")) for _ in range(20)]
        while bench.pool.waiting_count < 20:
            await asyncio.sleep(0)
        for task in given_up:
            task.cancel()
        held.open()
        assert (await bench.score("value 1")).value == 1.0
        assert (await running).value == 1.0
        assert bench.sample("rollmesh_reward_queue_seconds_count") == 2, "these two have left the queue for a worker"


async def test_a_verifier_that_never_scores_an_answer_is_a_wrong_setting_and_one_that_once_did_is_not(
    tmp_path: Path,
) -> None:
    async with scoring_bench(make_config(tmp_path, verifier="poisonous:verify")) as bench:
        await bench.score_all(["string"] * (UNSCORED_ANSWER_LIMIT - 1))
        assert not bench.failures
        await bench.score_all(["string"] * 2)
        (failure,) = bench.failures
        assert isinstance(failure, ConfigError)
        assert "none of the first 256 answers could be scored; the last: poisonous:verify: returned '1.0'" in str(
            failure
        )
    async with scoring_bench(make_config(tmp_path, verifier="poisonous:verify")) as bench:
        await bench.score("value 1")
        await bench.score_all(["string"] * (UNSCORED_ANSWER_LIMIT + 1))
        assert not bench.failures
