"""Entry point of the trainer service: one process, or the ranks that torchrun starts."""

import asyncio
import contextlib
import json
import os
import socket
from dataclasses import replace
from functools import partial

from rollmesh.checkpoints.bucket import open_checkpoints
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.describe import architecture_of, read_json
from rollmesh.config import RunConfig
from rollmesh.config.recipes import resolve_model
from rollmesh.config.trainer import TrainerConfig
from rollmesh.errors import CheckpointError, ConfigError, SessionLost, Unfinished
from rollmesh.runtime.lifecycle import Shutdown
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.service_host import ServiceHost, service_host
from rollmesh.runtime.tasks import cancel_and_wait
from rollmesh.scheduling import OnStale, Schedule, run_limits
from rollmesh.store.trajectory_store import open_service_store
from rollmesh.trainer.learner.distributed import (
    World,
    broadcast_bytes,
    join_world,
    leave_world,
    local_rank,
    pick_device,
)
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.trainer.service.leading_rank import LeadingRank, Retry, shared_waits
from rollmesh.trainer.service.policy_catalog import (
    PolicyCatalog,
    check_published,
    check_reference,
    model_folder,
    references_in_use,
)
from rollmesh.trainer.service.publishing import Publisher, canary_count, canary_sequences
from rollmesh.trainer.service.ranks import RankCoordinator, TorchExecutor
from rollmesh.trainer.service.run_log import build_trackers
from rollmesh.trainer.service.trainer_metrics import TrainerMetrics
from rollmesh.trainer.service.trainer_progress import Progress, load_newest_state
from rollmesh.trainer.service.training_loop import TrainingLoop
from rollmesh.trainer.service.training_session import LOOP_NAME, Stopped, TrainingSession

_STALLED_AFTER_SECONDS = 3600.0
_REDIS_RETRY_SECONDS = 5.0


async def serve(config: RunConfig, index: int, shutdown: Shutdown) -> None:
    """Train the run to its last step, or until ``shutdown``; under torchrun, ranks above 0 follow rank 0.

    Raises Unfinished, in every rank, if the ``shutdown`` of rank 0 came before the work was complete; SessionLost if a
    newer trainer has taken over, and CheckpointError or ConfigError for permanent errors.
    """
    unfinished = ""
    executor, loop = TorchExecutor(), asyncio.get_running_loop()
    try:
        async with contextlib.AsyncExitStack() as stack:
            host: ServiceHost | None = None
            if local_rank() == 0:
                # In the first rank of each node, because every pod is probed; also while the ranks meet and load the
                # model: after a restart of the ranks no startup probe covers that.
                host = await stack.enter_async_context(service_host(config, "trainer", index))
            if host is not None and os.environ.get("RANK", "0") == "0":
                host.publish()
            checkpoints = open_checkpoints(config, None if host is None else host.health.waits)
            ranks = await loop.run_in_executor(executor, build_ranks, config, checkpoints)
            if host is not None and ranks.world.leads:
                unfinished = await _lead(host, shutdown, checkpoints, ranks, executor)
                await loop.run_in_executor(executor, ranks.dismiss, unfinished)
            else:
                if host is not None:
                    host.health.set_ready(True)
                unfinished = await loop.run_in_executor(executor, ranks.follow)
            await loop.run_in_executor(executor, leave_world)
    finally:
        # A cancelled step may run for long; the interpreter waits for it, the event loop must not.
        executor.shutdown(wait=False, cancel_futures=True)
    if unfinished:
        raise Unfinished(f"stopped before the run was complete: {unfinished}")


def build_ranks(config: RunConfig, checkpoints: CheckpointStore) -> RankCoordinator:
    """Join the process group, take the settings of rank 0 and load the initial model."""
    world = join_world(pick_device(config.trainer.device).type)
    catalog = PolicyCatalog(checkpoints)
    schedule, folder = Schedule.from_config(config), model_folder(config, checkpoints)
    most = schedule.max_staleness if schedule.on_stale is OnStale.MASK_OLD_SEGMENTS else None
    section, max_token_staleness = _settings_of_rank_0(config.trainer, most, world)
    try:
        trainer = PolicyTrainer(
            folder,
            section,
            dtype=config.model.dtype,
            adapter=config.model.adapter,
            world=world,
            max_token_staleness=max_token_staleness,
            policy_folder=catalog.folder,
            longest=config.generator.max_context_tokens,
        )
    except CheckpointError as error:
        raise ConfigError(f"model.path={config.model.path}: {error}") from error
    return RankCoordinator(trainer, world, checkpoints, catalog)


def _settings_of_rank_0(
    own: TrainerConfig, max_token_staleness: int | None, world: World
) -> tuple[TrainerConfig, int | None]:
    """Return the trainer section and the staleness above which tokens are masked, both of rank 0, for every rank.

    While a rolling upgrade replaces the trainer's pods, ranks read different run files. With settings of its own, a
    rank would split a batch in another way: some trajectories would be trained twice, others never, or the ranks would
    wait for each other. Only the device is the rank's own.
    """
    if world.size == 1:
        return own, max_token_staleness
    settings = {"trainer": own.model_dump(mode="json"), "max_token_staleness": max_token_staleness}
    sent = json.loads(broadcast_bytes(json.dumps(settings).encode() if world.leads else None, world))
    return TrainerConfig.model_validate(sent["trainer"] | {"device": own.device}), sent["max_token_staleness"]


async def _lead(
    host: ServiceHost,
    shutdown: Shutdown,
    checkpoints: CheckpointStore,
    ranks: RankCoordinator,
    executor: TorchExecutor,
) -> str:
    """Train as rank 0; return the work that a shutdown left, empty when the run is complete."""
    health, metrics = host.health, TrainerMetrics(host.metrics)
    health.watch(LOOP_NAME, _STALLED_AFTER_SECONDS, executor.busy)
    store = await open_service_store(host, shutdown, _REDIS_RETRY_SECONDS)
    rank = LeadingRank(
        config=host.config,
        ranks=ranks,
        session=TrainingSession(store, checkpoints, ranks.catalog, metrics, shutdown, health),
        checkpoints=checkpoints,
        retry=Retry(metrics, health, shutdown),
        metrics=metrics,
        progress=Progress(),
        executor=executor,
        health=health,
        shutdown=shutdown,
    )
    try:
        async with shared_waits(store, health.waits):
            rank = await _take_over(rank)
            config, trainer = rank.config, ranks.trainer
            folder = resolve_model(config.model.path)
            vocab_size = architecture_of(read_json(folder / "config.json"), str(folder)).vocab_size
            canary = canary_sequences(
                vocab_size, canary_count(trainer.parameter_count, pick_device(config.trainer.device).type)
            )
            read = partial(references_in_use, config.trainer.algorithm, checkpoints, trainer.train_step)
            publisher = Publisher(rank, canary, await rank.retried("read_references", read))
            trackers = build_trackers(config)
            training = TrainingLoop(rank, publisher, trackers)
            health.set_ready(True)
            try:
                await _run(training, rank)
            finally:
                for tracker in trackers:
                    tracker.close()
            await rank.session.close()
            return await training.unfinished()
    except Stopped as stopped:
        return str(stopped)


async def _take_over(rank: LeadingRank) -> LeadingRank:
    """Fence older trainers, then continue from the newest state in the checkpoint store."""
    config, session, ranks, checkpoints, retry = rank.config, rank.session, rank.ranks, rank.checkpoints, rank.retry
    name, limits = f"{socket.gethostname()}-{os.getpid()}", run_limits(config)
    await retry.run("open_session", partial(session.open, name, limits))
    leftovers = await rank.retried("remove_unfinished_batches", checkpoints.remove_unfinished_batches)
    load = partial(rank.in_torch, partial(load_newest_state, ranks, checkpoints, config))
    # Other ranks may have begun to load, and end when this one fails.
    progress = await (retry.run("load_state", load) if ranks.world.size == 1 else load())
    await retry.run("begin_session", partial(session.begin, ranks.trainer.train_step))
    await rank.retried("check_reference", partial(check_reference, config.trainer.algorithm, ranks.catalog))
    if ranks.trainer.adapter is not None:
        await asyncio.to_thread(check_published, ranks.trainer, ranks.catalog)
    get_logger("trainer").info(
        "trainer_takes_over",
        train_step=ranks.trainer.train_step,
        parameters=ranks.trainer.parameter_count,
        ranks=ranks.world.size,
        unfinished_batch_files=leftovers,
    )
    return replace(rank, progress=progress)


async def _run(training: TrainingLoop, rank: LeadingRank) -> None:
    watch = asyncio.create_task(rank.session.watch(rank.config.store.heartbeat_seconds), name="watch-session")
    train = asyncio.create_task(training.run(), name="train")
    train.add_done_callback(lambda _: watch.cancel())
    superseded = (
        f"another trainer has taken over run {rank.config.name}, so this trainer stops at train step "
        "{train_step}: two trainers on one run; stop one of them"
    )
    try:
        await asyncio.wait({watch, train}, return_when=asyncio.FIRST_EXCEPTION)
        for task in (watch, train):
            if task.done() and not task.cancelled():
                task.result()
    except SessionLost as error:
        raise SessionLost(superseded.format(train_step=training.train_step)) from error
    except (CheckpointError, OSError) as error:
        # A newer trainer deletes unfinished files of an older one. In that case the disk is not the problem.
        try:
            await rank.session.check()
        except SessionLost:
            raise SessionLost(superseded.format(train_step=training.train_step)) from error
        raise
    finally:
        await cancel_and_wait(watch, train)
