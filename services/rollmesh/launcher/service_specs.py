"""Service processes of a local run: commands, environment, and order of shutdown."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping

from rollmesh.checkpoints.sealing import random_once
from rollmesh.config import RunConfig
from rollmesh.config.load import secret_environment
from rollmesh.config.replica_bounds import configured_replicas
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.launcher.supervisor import ServiceSpec
from rollmesh.runtime.port_security import is_loopback

TOKEN_FILE = "mesh-token"
WORKERS = ("agents", "rollout")
"""Services that hold trajectories in progress."""
STOP_ORDER = (*WORKERS, "generator", "reward", "trainer", "gateway")
"""The sources of work stop first, so that the services behind it can drain; the gateway stops last."""


def child_environment(config: RunConfig, redis_url: str) -> dict[str, str]:
    """Build the environment variables of a service process; secrets are passed here, never in files or arguments."""
    threads = str(config.launcher.torch_threads)
    environment = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
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


def service_specs(config: RunConfig, folder: RunFolder, environment: Mapping[str, str]) -> list[ServiceSpec]:
    """Return the service processes that the run file configures, in start order."""
    counts = {"trainer": 1, **configured_replicas(config)}
    agents = config.rollout.program == "agent" if config.agents.enabled is None else config.agents.enabled
    counts |= {"gateway": int(config.gateway.enabled), "agents": int(agents)}
    return [
        service_spec(config, folder, environment, service, index)
        for service, count in counts.items()
        for index in range(count)
    ]


def service_spec(
    config: RunConfig, folder: RunFolder, environment: Mapping[str, str], service: str, index: int
) -> ServiceSpec:
    """Return the specification of one service process."""
    # -P: a module of the user, such as redis.py, in the current folder hides no library.
    interpreter = [sys.executable, "-P"]
    if service == "trainer" and config.launcher.trainer_processes > 1:
        ranks = str(config.launcher.trainer_processes)
        interpreter += ["-m", "rollmesh.trainer.torchrun", "--standalone", "--nproc-per-node", ranks]
        interpreter += ["--no-python", sys.executable, "-u", "-P"]
    command = [*interpreter, "-m", "rollmesh.cli.main", service, str(folder.config_file)]
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
