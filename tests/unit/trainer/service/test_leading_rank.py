"""Writes that wait for the disk or the store, and the torch thread."""

from __future__ import annotations

import asyncio
import errno
import threading

import pytest

from rollmesh.errors import CheckpointError, Reason
from rollmesh.runtime.health import Health
from rollmesh.runtime.metrics import Metrics
from rollmesh.runtime.tasks import Backoff
from rollmesh.trainer.service.leading_rank import Retry
from rollmesh.trainer.service.ranks import TorchExecutor
from rollmesh.trainer.service.trainer_metrics import TrainerMetrics
from rollmesh.trainer.service.training_session import LOOP_NAME, Stopped


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
