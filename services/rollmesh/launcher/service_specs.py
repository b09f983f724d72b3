"""Service processes of a local run: commands, environment, order of shutdown, and replicas as operators request them.

wanted     the newest request in the store (``rollmesh scale``, the gateway), or the run file
missing    start immediately
surplus    stop one at a time per service, highest index first: SIGTERM, drain, SIGKILL after the grace period; other
           replicas continue their rollouts
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial

from rollmesh.checkpoints.sealing import random_once
from rollmesh.config import RunConfig
from rollmesh.config.load import secret_environment
from rollmesh.config.replica_bounds import check_scale, configured_replicas
from rollmesh.config.teachers import teacher_service
from rollmesh.errors import ConfigError, StoreUnavailable
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.launcher.supervisor import ServiceSpec, Supervisor
from rollmesh.runtime.port_security import is_loopback
from rollmesh.store.operator_settings import Scaling

TOKEN_FILE = "mesh-token"
WORKERS = ("agents", "rollout")
"""Services that hold trajectories in progress."""
_LEAVE_SECONDS = 2.0


def stop_order(config: RunConfig) -> tuple[str, ...]:
    """Return all services: the sources of work stop first, so that those behind them can drain; the gateway last."""
    teachers = map(teacher_service, config.teachers)
    return (*WORKERS, "generator", "reward", *teachers, "trainer", "gateway")


def child_environment(config: RunConfig, redis_url: str) -> dict[str, str]:
    """Build the environment variables of a service process; secrets are passed here, never in files or arguments."""
    environment = {
        **thread_variables(config.launcher.torch_threads),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "ROLLMESH_STORE__URL": redis_url,
        # All processes share one run file here, so each one binds a free port.
        "ROLLMESH_NETWORK__GRPC_PORT": "0",
        "ROLLMESH_NETWORK__ADMIN_PORT": "0",
        **secret_environment(config),
    }
    if config.security.token_file is not None:
        environment["ROLLMESH_SECURITY__TOKEN_FILE"] = json.dumps(config.security.token_file, ensure_ascii=False)
        environment["ROLLMESH_SECURITY__OPEN_METRICS"] = json.dumps(config.security.open_metrics)
    return environment


def thread_variables(threads: int) -> dict[str, str]:
    """Return the environment variables that set the threads of a process on cores that it shares with others."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    # A thread that spins while it waits takes a core from the thread or the process that it waits for.
    return {**dict.fromkeys(names, str(threads)), "OMP_WAIT_POLICY": "PASSIVE"}


def service_specs(config: RunConfig, folder: RunFolder, environment: Mapping[str, str]) -> list[ServiceSpec]:
    """Return the service processes that the run file configures, in start order."""
    counts = {"trainer": 1, **configured_replicas(config)}
    agents = config.rollout.program == "agent" if config.agents.enabled is None else config.agents.enabled
    counts |= {"gateway": int(config.gateway.enabled), "agents": agents * config.launcher.agents_replicas}
    return [
        service_spec(config, folder, environment, service, index)
        for service, count in counts.items()
        for index in range(count)
    ]


def service_spec(
    config: RunConfig, folder: RunFolder, environment: Mapping[str, str], service: str, index: int
) -> ServiceSpec:
    """Return the specification of one service process."""
    ranks = config.launcher.least_trainer_processes if service == "trainer" else 1
    teacher = next((name for name in config.teachers if teacher_service(name) == service), None)
    called = [service, str(folder.config_file)] if teacher is None else ["teacher", str(folder.config_file), teacher]
    command = [*rollmesh_command(ranks), *called]
    command += ["--index", str(index), "--supervised-by", str(os.getpid())]
    final_errors = {"ConfigError", "DataError"}
    if service == "trainer":
        # A newer trainer has taken over; a restart would fence it, and the two would alternate.
        final_errors.add("SessionLost")
    return ServiceSpec(
        service=service,
        index=index,
        command=command,
        environment=environment,
        log_file=folder.log_file(service, index),
        grace_seconds=config.generator.drain_timeout_seconds + 10.0,
        one_shot=service == "trainer",
        # The run continues without its page or an API that no rollout needs, for example when the port is in use.
        vital=service != "gateway" and (service != "agents" or config.rollout.program == "agent"),
        final_errors=frozenset(final_errors),
    )


def rollmesh_command(ranks: int = 1) -> list[str]:
    """Return the command ``rollmesh`` of this interpreter, in as many ranks below one torchrun if there are several."""
    # -P: a module of the user, such as redis.py, in the current folder hides no library.
    interpreter = [sys.executable, "-P"]
    if ranks > 1:
        interpreter += ["-m", "rollmesh.trainer.torchrun", "--standalone", "--nproc-per-node", str(ranks)]
        interpreter += ["--no-python", sys.executable, "-u", "-P"]
    return [*interpreter, "-m", "rollmesh.cli.main"]


def with_mesh_token(config: RunConfig, folder: RunFolder) -> RunConfig:
    """Return the config with a token for the service ports of the run; ``/metrics`` stays open for a local Prometheus.

    Loopback ports are open to every user of the machine: one call could run code as the run's owner, or stop the run.
    The token is a file of the run folder (mode 0600), created if missing, and the services receive its path.

    The config is unchanged with a token or certificates in the run file, and for services that listen beyond this
    machine: these may work with services that the operator started separately.
    """
    security = config.security
    configured = security.token is not None or security.token_file is not None or security.tls.enabled
    if configured or not is_loopback(f"{config.launcher.host}:0"):
        return config
    file = folder.path / TOKEN_FILE
    random_once(file)
    secured = security.model_copy(update={"token_file": str(file), "open_metrics": True})
    return config.model_copy(update={"security": secured})


def plan_replicas(wanted: int, present: Collection[int], leaving: Collection[int]) -> tuple[list[int], int | None]:
    """Plan one round of one service: return the indexes to start, and the one to stop.

    ``present`` are the indexes of all processes of the service; ``leaving`` are those that drain already. An index that
    drains restarts only after its process has exited.
    """
    surplus = [index for index in set(present) - set(leaving) if index >= wanted]
    missing = [index for index in range(wanted) if index not in present]
    return missing, max(surplus) if surplus and not leaving else None


class ReplicaScaler:
    """Starts and stops of the replicas of one run, for the launcher that holds the run folder's lock."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        scaling: Scaling | None,
        supervisor: Supervisor,
        note: Callable[[str], None],
    ) -> None:
        """Without ``scaling`` the replicas of the run file are fixed."""
        self._config = config
        self._folder = folder
        self._scaling = scaling
        self._supervisor = supervisor
        self._note = note
        self._configured = configured_replicas(config)
        self._wanted = dict(self._configured)
        self._refused: dict[str, str] = {}
        self._services: tuple[str, ...] = ()
        self._environment: Mapping[str, str] = {}

    async def begin(self, services: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the wanted replicas of these services; ``reconcile`` adjusts them from then on."""
        self._environment = environment
        self._services = tuple(service for service in self._configured if service in services)
        for service, replicas in (await self._requests()).items():
            if replicas != self._configured[service]:
                self._note(f"{service}: {replicas} replicas, as requested (the run file: {self._configured[service]})")
            self._wanted[service] = replicas
        self._apply()

    async def reconcile(self) -> None:
        """Read the requests once, and start or stop the replicas that differ."""
        if not self._services:
            return
        for service, replicas in (await self._requests()).items():
            if replicas != self._wanted[service]:
                self._note(f"{service}: {self._wanted[service]} -> {replicas} replicas")
                self._wanted[service] = replicas
        self._apply()

    async def end(self) -> None:
        """Stop scaling, and record in the store that no launcher applies requests any more."""
        self._services = ()
        if self._scaling is None:
            return
        with suppress(StoreUnavailable, TimeoutError):
            async with asyncio.timeout(_LEAVE_SECONDS):
                await self._scaling.leave()

    async def _requests(self) -> dict[str, int]:
        """Read the wanted replicas by local service; note each impossible request once and ignore it."""
        launcher = f"{os.uname().nodename}:{os.getpid()}"
        requests = {} if self._scaling is None else await self._scaling.take(launcher)
        wanted = {service: self._configured[service] for service in self._services}
        for service in self._services:
            if service not in requests:
                continue
            try:
                check_scale(self._config, service, requests[service])
            except ConfigError as error:
                if self._refused.get(service) != str(error):
                    self._note(f"not scaled: {error}")
                self._refused[service] = str(error)
                wanted[service] = self._wanted[service]
            else:
                self._refused.pop(service, None)
                wanted[service] = requests[service]
        return wanted

    def _apply(self) -> None:
        for service in self._services:
            present, leaving = self._supervisor.indexes(service)
            missing, surplus = plan_replicas(self._wanted[service], present, leaving)
            for index in missing:
                self._supervisor.start(service_spec(self._config, self._folder, self._environment, service, index))
            if surplus is not None:
                name = f"{service}-{surplus}"
                self._supervisor.retire(name).add_done_callback(partial(self._tidy, name))

    def _tidy(self, name: str, task: asyncio.Task[None]) -> None:
        """Remove the endpoint files that a killed process leaves, so that no client connects to it."""
        if task.cancelled():
            return
        for folder in ("services", "scrape"):
            with suppress(OSError):
                (self._folder.path / folder / f"{name}.json").unlink(missing_ok=True)
        self._note(f"{name} drained and stopped")
