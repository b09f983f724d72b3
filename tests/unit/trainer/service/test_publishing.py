"""Canaries, kept versions, what the queue keeps of a step, and writes that wait for the disk or the store."""

import asyncio
import errno
import json
import math
import threading
from typing import Any

import numpy as np
import pytest

from rollmesh.errors import CheckpointError, ConfigError, Reason, TrainingDiverged
from rollmesh.gateway.curves import EVALUATION, Curves
from rollmesh.runtime.health import Health
from rollmesh.runtime.metrics import Metrics
from rollmesh.runtime.tasks import Backoff
from rollmesh.step_metrics import curves
from rollmesh.trainer.service.leading_rank import Retry
from rollmesh.trainer.service.publishing import canary_count, canary_sequences, kept_policies, scored_canary
from rollmesh.trainer.service.ranks import TorchExecutor
from rollmesh.trainer.service.step_summaries import reported
from rollmesh.trainer.service.trainer_metrics import TrainerMetrics
from rollmesh.trainer.service.training_session import LOOP_NAME, Stopped

from ....kit.run_files import run_config


def test_the_canary_is_the_same_for_every_policy_and_within_the_vocabulary() -> None:
    first, second = canary_sequences(50), canary_sequences(50)
    assert len(first) == 8
    for left, right in zip(first, second, strict=True):
        assert np.array_equal(left, right)
        assert left.dtype == np.int32
        assert len(left) >= 2
        assert left.min() >= 0
        assert left.max() < 50


def test_only_a_large_model_on_a_cpu_has_fewer_canary_sequences_and_they_are_the_first_ones() -> None:
    assert canary_count(99_999_999, "cpu") == canary_count(10**11, "cuda") == 8
    count = canary_count(100_000_000, "cpu")
    assert count == 2
    few = canary_sequences(50, count)
    assert [ids.tolist() for ids in few] == [ids.tolist() for ids in canary_sequences(50)[:2]]


@pytest.mark.parametrize(
    ("state_every_steps", "source", "kept"), [(1, "sampler", 4), (1, "snapshot", 9), (3, "snapshot", 11)]
)
def test_the_snapshot_source_keeps_every_version_that_a_batch_or_its_replay_after_a_crash_may_name(
    state_every_steps: int, source: str, kept: int
) -> None:
    checkpoints = f"checkpoints.keep_last=4 checkpoints.state_every_steps={state_every_steps}"
    fields = f"schedule.max_staleness=7 trainer.algorithm.old_logprobs={source} {checkpoints}"
    assert kept_policies(run_config(fields)) == kept


@pytest.mark.parametrize(
    ("train_step", "error", "remedy"),
    [(0, ConfigError, "model.path: .*use another checkpoint"), (3, TrainingDiverged, "lower trainer.learning_rate")],
)
def test_only_a_trained_policy_is_blamed_on_the_learning_rate(
    train_step: int, error: type[Exception], remedy: str
) -> None:
    sequences = canary_sequences(40, 2)
    logprobs = [np.full(len(ids) - 1, np.nan, np.float32) for ids in sequences]
    with pytest.raises(error, match=remedy):
        scored_canary(train_step, sequences, logprobs)


def full_record() -> dict[str, Any]:
    """A line of metrics.jsonl with a number wherever a curve looks for one, and others beside them."""
    record: dict[str, Any] = {"train_step": 7, "time": 1_700_000_000.25, "policy_version": 7, "updates": 2}
    paths = [path for metric in curves().values() for path in metric.paths]
    for number, path in enumerate(paths, start=1):
        inner = record
        *folders, name = path.split(".")
        for key in folders:
            inner = inner.setdefault(key, {"other": 0.5})
        inner[name] = number / 7
    record["batch"]["trajectory_staleness"] = {"mean": 0.4, "max": 2, "histogram": {"0": 6, "2": 1}}
    record["seconds"] = {"evidence": 0.5, "gradient": 1.5, "update": 0.25, "statistics": 0.05}
    return record


def test_curves_are_the_same_from_what_the_queue_keeps() -> None:
    whole, kept = Curves(), Curves()
    whole.add_report(full_record())
    kept.add_report(json.loads(json.dumps(reported(full_record()))))
    assert kept.report == whole.report
    assert kept.trained_staleness == whole.trained_staleness != []
    names = list(curves())
    assert kept.answer(names, 10) == whole.answer(names, 10)
    assert all(series.x == [7.0] for series in kept.answer(names, 10).series)
    assert EVALUATION not in names


def test_fields_that_the_gateway_does_not_show_are_left_out() -> None:
    kept = reported(full_record())
    assert "other" not in json.dumps(kept)
    assert not {"policy_version", "updates"} & kept.keys()


def test_a_step_that_went_wrong_is_reported_as_json_all_the_same() -> None:
    record = full_record() | {"loss": math.nan, "grad_norm": None, "policy": {"ratio": None, "entropy": math.inf}}
    kept = json.loads(json.dumps(reported(record), allow_nan=False))
    assert (kept["loss"], kept["policy"]) == (None, {"entropy": None})


def full() -> CheckpointError:
    return CheckpointError("disk full", reason=Reason.DISK_FULL)


def retry_of(health: Health | None = None, *, pause: float = 0.001, metrics: Metrics | None = None) -> Retry:
    backoff = Backoff(first_seconds=pause)
    return Retry(TrainerMetrics(metrics or Metrics("trainer")), health or Health(), asyncio.Event(), backoff, 3600.0)


async def test_a_full_disk_is_waited_for_and_counted() -> None:
    metrics, health = Metrics("trainer"), Health()
    health.set_ready(True)
    retry = retry_of(health, metrics=metrics)
    ready: list[bool] = []

    async def write() -> str:
        ready.append(health.ready()[0])
        if len(ready) < 3:
            raise full()
        return "written"

    assert await retry.run("publish", write) == "written"
    assert health.ready() == (True, "")
    assert ready == [True, False, False]
    assert b'rollmesh_trainer_checkpoint_failures_total{reason="disk_full"} 2.0' in metrics.exposition()


async def test_a_trainer_that_waits_for_an_unreachable_store_is_alive_after_hours() -> None:
    now = 0.0
    health = Health(clock=lambda: now)
    health.watch(LOOP_NAME, 3600.0)
    retry = retry_of(health, pause=0.0)
    stalled: list[dict[str, float]] = []

    async def write() -> None:
        nonlocal now
        stalled.append(health.stalled())
        now += 60.0
        if now < 7200.0:
            raise CheckpointError("no answer", reason=Reason.UNREACHABLE)

    await retry.run("publish", write)
    assert len(stalled) == 120 and not any(stalled)


async def test_any_other_failure_is_not_repeated() -> None:
    calls: list[Exception] = []

    async def write() -> None:
        calls.append(CheckpointError("tampered", reason=Reason.TAMPERED))
        raise calls[-1]

    with pytest.raises(CheckpointError, match="tampered"):
        await retry_of().run("publish", write)
    assert len(calls) == 1


async def test_an_error_of_the_file_system_is_counted_for_a_scrape_before_it_is_raised() -> None:
    metrics, health, shutdown = Metrics("trainer"), Health(), asyncio.Event()
    retry = Retry(TrainerMetrics(metrics), health, shutdown, scrape_seconds=3600.0)
    failed = asyncio.Event()

    async def write() -> None:
        failed.set()
        raise OSError(errno.EROFS, "Read-only file system")

    writing = asyncio.create_task(retry.run("publish", write))
    await failed.wait()
    assert b'rollmesh_trainer_checkpoint_failures_total{reason="io_error"} 1.0' in metrics.exposition()
    assert "Read-only file system" in health.waits.text()
    assert not writing.done()
    shutdown.set()
    with pytest.raises(OSError, match="Read-only"):
        await writing


async def test_files_that_a_newer_trainer_deletes_are_no_failure_of_the_store() -> None:
    metrics = Metrics("trainer")

    async def write() -> None:
        raise FileNotFoundError("gone")

    async with asyncio.timeout(60):
        with pytest.raises(FileNotFoundError):
            await retry_of(metrics=metrics).run("publish", write)
    assert b'rollmesh_trainer_checkpoint_failures_total{reason="io_error"} 0.0' in metrics.exposition()


async def test_shutdown_ends_the_wait() -> None:
    shutdown = asyncio.Event()
    retry = Retry(TrainerMetrics(Metrics("trainer")), Health(), shutdown, backoff=Backoff(first_seconds=60.0))

    async def write() -> None:
        shutdown.set()
        raise full()

    with pytest.raises(Stopped):
        await retry.run("publish", write)


async def test_a_write_that_waits_shows_until_it_is_done_whatever_else_succeeds_meanwhile() -> None:
    health = Health()
    health.set_ready(True)
    retry = retry_of(health)
    waits, room = asyncio.Event(), asyncio.Event()

    async def blocked() -> None:
        if not waits.is_set():
            waits.set()
            raise full()
        await room.wait()

    async def written() -> None:
        pass

    publication = asyncio.create_task(retry.run("publish", blocked))
    await waits.wait()
    await retry.run("write_batch", written)
    assert health.ready() == (False, "disk full: publish: disk full")
    room.set()
    await publication
    assert health.ready() == (True, "")


def test_a_loop_is_alive_while_torch_computes_however_long_and_stalls_an_hour_after_it() -> None:
    now = 0.0
    health, end = Health(clock=lambda: now), threading.Event()
    with TorchExecutor() as executor:
        health.watch("train", 3600.0, executor.busy)
        step = executor.submit(end.wait)
        now = 7200.0
        assert health.stalled() == {}
        end.set()
        step.result(60)
        executor.submit(lambda: None).result(60)
    assert not executor.busy()
    now = 10_801.0
    assert health.stalled() == {"train": 3601.0}
