"""Evaluations: in a run, of a stopped run by ``rollmesh eval``, and beside a run with other data or settings."""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from rollmesh.checkpoints.bucket import open_checkpoints
from rollmesh.checkpoints.sealing import SECRET_FILE
from rollmesh.config import RunConfig, load_run_config, text_override
from rollmesh.config.data import JsonlSource
from rollmesh.config.recipes import resolve_model
from rollmesh.config.store import StoreConfig
from rollmesh.errors import ConfigError
from rollmesh.launcher.local_mesh import OFTEN_SECONDS, LocalMesh, local_mesh
from rollmesh.launcher.run_folder import RunFolder, locked_run_folder
from rollmesh.report.model_export import published_record
from rollmesh.report.recorded_run import Evaluation, RecordedRun
from rollmesh.store.evaluation_requests import due_at_end, evaluation_request
from rollmesh.tasks.sources.source_protocol import build_prompt_source
from rollmesh.text import Tokenizer
from rollmesh.types import PolicyRecord

_PARQUET = (".parquet", ".pq")


async def evaluate_version(mesh: LocalMesh, policy_version: int) -> Evaluation:
    """Evaluate one policy version on the idle mesh, or return the result of an earlier start."""
    waiting_for = f"the evaluation of policy version {policy_version}"
    earlier = await mesh.answer(lambda: mesh.evaluations.finished(policy_version), waiting_for)
    if earlier is not None:
        return earlier
    present, leaving = mesh.supervisor.indexes("generator")
    if set(present) <= set(leaving):
        # Before one is started, here or outside, the evaluation would end without a score, for good.
        await mesh.until_any_serves()
    await mesh.until_idle()
    request = evaluation_request(mesh.config.evaluation, policy_version)
    found: list[Evaluation] = []

    async def finished() -> bool:
        # Repeated at every poll: a Redis restored to an earlier state has lost the request.
        await mesh.store.evaluations.request(request)
        result = await mesh.evaluations.finished(policy_version)
        if result is not None:
            found.append(result)
        return result is not None

    await mesh.until(finished, waiting_for, poll_seconds=OFTEN_SECONDS)
    await mesh.answer(mesh.evaluations.update, waiting_for)
    return found[-1]


async def finish_evaluations(mesh: LocalMesh) -> None:
    """Pause the run and wait for every evaluation that is due or requested."""
    waiting_for = "evaluations in progress"
    newest = await mesh.answer(mesh.latest_version, waiting_for)
    # The leader requests each of them, but may not have seen the last version yet.
    for version in due_at_end(mesh.config.evaluation, newest, mesh.config.checkpoints.keep_last):
        request = evaluation_request(mesh.config.evaluation, version)
        await mesh.answer(partial(mesh.store.evaluations.request, request), waiting_for)

    async def all_answered() -> bool:
        return all(record.result is not None for record in await mesh.store.evaluations.all())

    if not await mesh.answer(all_answered, waiting_for):
        await mesh.until_idle()
        await mesh.until(all_answered, waiting_for, poll_seconds=OFTEN_SECONDS)
    await mesh.answer(mesh.evaluations.update, waiting_for)


async def evaluate_run(
    config: RunConfig, folder: RunFolder, policy_version: int | None, shutdown: asyncio.Event, console: Console
) -> Evaluation:
    """Evaluate ``policy_version`` (None: the newest) of a stopped run; start its services for the evaluation.

    Raises ConfigError for agents outside of the mesh, while a launcher holds the folder or workers run without one
    (``evaluation.every_versions`` evaluates during a run), when the version was never published or is pruned, when no
    generator is wanted, or when rollouts of a killed run cannot end before a trainer starts.
    """
    refuse_agents(config)
    remedy = "stop it first, or let it evaluate versions itself: evaluation.every_versions"
    with locked_run_folder(config, remedy):
        async with local_mesh(config, folder, shutdown, console) as mesh:
            await _check_workers(mesh)
            version = await _published(mesh, policy_version)
            await _check_generators(mesh)
            await _check_recovery(mesh, version)
            await mesh.pause(True)
            async with mesh.services(_services_of(config)):
                await mesh.until_serving()
                return await evaluate_version(mesh, version)


def _services_of(config: RunConfig) -> tuple[str, ...]:
    """Return the services that an evaluation needs: no trainer, and the agents service only to run an agent."""
    agents = ("agents",) if config.rollout.program == "agent" else ()
    return ("generator", "reward", "rollout", *agents)


def refuse_agents(config: RunConfig) -> None:
    """Raise ConfigError for a run whose agents do not come from the mesh itself."""
    if config.rollout.program == "agent" and config.rollout.agent.function is None:
        raise ConfigError(
            "rollout.program=agent without rollout.agent.function: the agents are not part of the mesh; evaluate them "
            "in a run, with evaluation.every_versions or evaluation.before_and_after"
        )


async def _check_workers(mesh: LocalMesh) -> None:
    """Refuse a run of services that were started one by one: the evaluation would pause it and share its workers."""
    if mesh.config.store.url is None:
        return  # No worker outlives the launcher of an embedded Redis.
    view = await mesh.store.mesh.view(groups=False)
    alive = await mesh.store.sessions.count_alive(view.now)
    if alive:
        raise ConfigError(
            f"{mesh.folder.path}: {alive} rollout worker(s) of the run are alive; stop them first, or let the run "
            "evaluate versions itself: evaluation.every_versions (a worker that was killed counts for "
            f"store.session_ttl_seconds={mesh.config.store.session_ttl_seconds:g})"
        )


async def _published(mesh: LocalMesh, policy_version: int | None) -> int:
    versions = [policy.policy_version for policy in await mesh.store.policies.announced()]
    if not versions:
        raise ConfigError(f"{mesh.folder.path}: the run has published no policy yet")
    if policy_version is None:
        return max(versions)
    if policy_version not in versions:
        raise ConfigError(f"--version {policy_version}: published versions are {min(versions)} to {max(versions)}")
    kept = await asyncio.to_thread(lambda: open_checkpoints(mesh.config).complete_policies())
    if policy_version not in (remaining := sorted({policy.policy_version for policy in kept})):
        raise ConfigError(
            f"--version {policy_version}: its weights are pruned (checkpoints.keep_last="
            f"{mesh.config.checkpoints.keep_last}); kept are {', '.join(map(str, remaining)) or 'none'}"
        )
    return policy_version


async def _check_generators(mesh: LocalMesh) -> None:
    wanted = (await mesh.store.scaling.requests()).get("generator")
    if wanted == 0 and not await mesh.store.generators.live():
        raise ConfigError(
            "generator=0 is requested with rollmesh scale, and an evaluation needs a generator: "
            f"rollmesh scale {mesh.folder.path} generator=default"
        )


async def _check_recovery(mesh: LocalMesh, policy_version: int) -> None:
    """Refuse what would wait for ever: without a trainer, a dead worker keeps its rollouts and its evaluation."""
    if not await mesh.store.recovery.waits_for_trainer():
        return
    view, evaluations = await mesh.store.mesh.view(groups=False), await mesh.store.evaluations.all()
    claimed = any(record.claimed and record.request.policy_version == policy_version for record in evaluations)
    if view.leased or claimed:
        raise ConfigError(
            f"{mesh.folder.path}: the run and its Redis were killed, and only a trainer can confirm what was trained; "
            f"continue the run once with rollmesh up {mesh.folder.config_file}, stop it, then evaluate"
        )


async def evaluate_beside(
    run: RunFolder, overrides: Sequence[str], version: int | None, shutdown: asyncio.Event, console: Console
) -> Evaluation:
    """Evaluate a policy version (None: the newest) of a run with fields of its run file replaced.

    Raises ConfigError or DataError for fields and prompts that no evaluation can use, before anything is started.
    """
    record = published_record(RecordedRun(run.path), version)
    with _scratch_folder(run) as scratch:
        config = _config_beside(run, scratch, overrides)
        refuse_agents(config)
        await asyncio.to_thread(_try_prompts, config)
        if (secret := run.path / SECRET_FILE).exists():
            shutil.copyfile(secret, scratch / SECRET_FILE)
        with locked_run_folder(config) as folder:
            async with local_mesh(config, folder, shutdown, console) as mesh:
                await _announce(mesh, record)
                async with mesh.services(_services_of(config)):
                    await mesh.until_serving()
                    return await evaluate_version(mesh, record.policy_version)


def source_of(config: RunConfig, file: Path) -> dict[str, Any]:
    """Return the evaluation source for a file of prompts, with the fields of the run's own table if it has one."""
    own = next((s for s in (config.data.evaluation_source, config.data.source) if isinstance(s, JsonlSource)), None)
    kind = "parquet" if file.suffix in _PARQUET else "jsonl"
    return (own.model_dump() if own is not None else {}) | {"type": kind, "path": str(file.resolve())}


@contextlib.contextmanager
def _scratch_folder(run: RunFolder) -> Iterator[Path]:
    """Make a folder inside the run folder, and remove it unless the evaluation fails: then its logs stay."""
    scratch = Path(tempfile.mkdtemp(prefix="evaluation-", dir=run.path))
    try:
        yield scratch
    except BaseException:
        if not any((scratch / "logs").glob("*.log")):
            shutil.rmtree(scratch, ignore_errors=True)
        raise
    shutil.rmtree(scratch, ignore_errors=True)


def _config_beside(run: RunFolder, scratch: Path, overrides: Sequence[str]) -> RunConfig:
    """Return the run file of the evaluation: the run's with the overrides, its own folder, and an embedded server."""
    own = load_run_config(run.config_file)
    place = own.checkpoints
    if not place.remote:
        place = place.model_copy(update={"folder": place.folder or str(run.path / "checkpoints")})
    elif place.cache_folder is None:
        place = place.model_copy(update={"cache_folder": str(run.path / "checkpoints")})
    config = load_run_config(run.config_file, [*overrides, text_override("folder", scratch)])
    store = StoreConfig(
        heartbeat_seconds=own.store.heartbeat_seconds, session_ttl_seconds=own.store.session_ttl_seconds
    )
    agents = config.agents.model_copy(update={"port": 0})  # the run in progress has its own
    return config.model_copy(update={"checkpoints": place, "store": store, "agents": agents})


def _try_prompts(config: RunConfig) -> None:
    """Open the prompts. Raises ConfigError or DataError if there are none."""
    tokenizer = Tokenizer(resolve_model(config.model.path))
    if not build_prompt_source(config.data, tokenizer, config.evaluation.seed, "eval").epoch_size:
        raise ConfigError("data.evaluation_source: no prompts; give a file with rows")


async def _announce(mesh: LocalMesh, record: PolicyRecord) -> None:
    """Register the policy under its number. Versions before it have its weights: no generator loads them."""
    session = await mesh.store.training.open_session("evaluation")
    for number in range(record.policy_version + 1):
        await mesh.store.policies.announce(session, replace(record, policy_version=number))
    await mesh.store.training.close_session(session)
