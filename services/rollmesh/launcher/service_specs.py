"""Which processes a local run consists of."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping

from rollmesh.config import RunConfig
from rollmesh.config.replica_bounds import configured_replicas
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.launcher.supervisor import ServiceSpec

STOP_ORDER = ("rollout", "generator", "reward", "trainer", "gateway")
"""Work stops at its source first, so that everything behind it can drain; people may watch until the end."""


def child_environment(config: RunConfig, redis_url: str) -> dict[str, str]:
    """Variables of every service process: secrets travel here, never in files or arguments."""
    threads = str(config.launcher.torch_threads)
    environment = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "ROLLMESH_STORE__URL": redis_url,
        # One run file starts many processes here, so none can have a port of its own choice.
        "ROLLMESH_NETWORK__GRPC_PORT": "0",
        "ROLLMESH_NETWORK__ADMIN_PORT": "0",
    }
    secrets = {
        "ROLLMESH_STORE__PASSWORD": config.store.password,
        "ROLLMESH_STORE__SENTINEL_PASSWORD": config.store.sentinel_password,
        "ROLLMESH_CHECKPOINTS__SECRET": config.checkpoints.secret,
        "ROLLMESH_GENERATOR__SGLANG__ADMIN_KEY": config.generator.sglang.admin_key,
        "ROLLMESH_SECURITY__TOKEN": config.security.token,
        "ROLLMESH_GATEWAY__TOKEN": config.gateway.token,
    }
    environment |= {name: secret.get_secret_value() for name, secret in secrets.items() if secret is not None}
    if config.security.token_file is not None:
        environment["ROLLMESH_SECURITY__TOKEN_FILE"] = json.dumps(config.security.token_file)
        environment["ROLLMESH_SECURITY__OPEN_METRICS"] = json.dumps(config.security.open_metrics)
    return environment


def service_specs(config: RunConfig, folder: RunFolder, environment: Mapping[str, str]) -> list[ServiceSpec]:
    """Every service process of the run as its run file has them, in start order."""
    counts = {"trainer": 1, **configured_replicas(config), "gateway": int(config.gateway.enabled)}
    return [
        service_spec(config, folder, environment, service, index)
        for service, count in counts.items()
        for index in range(count)
    ]


def service_spec(
    config: RunConfig, folder: RunFolder, environment: Mapping[str, str], service: str, index: int
) -> ServiceSpec:
    """One service process."""
    interpreter = [sys.executable]
    if service == "trainer" and config.launcher.trainer_processes > 1:
        ranks = str(config.launcher.trainer_processes)
        interpreter += ["-m", "rollmesh.trainer.torchrun", "--standalone", "--nproc-per-node", ranks]
    command = [
        *interpreter,
        "-m",
        "rollmesh.cli.main",
        service,
        str(folder.config_file),
        "--index",
        str(index),
        "--supervised-by",
        str(os.getpid()),
    ]
    final_errors = {"ConfigError", "DataError"}
    if service == "trainer":
        # A newer trainer has taken over: one that came back would fence that one in turn, and so on.
        final_errors.add("SessionLost")
    return ServiceSpec(
        service=service,
        index=index,
        command=command,
        environment=environment,
        log_file=folder.log_file(service, index),
        grace_seconds=config.generator.drain_timeout_seconds + 10.0,
        one_shot=service == "trainer",
        # A page that cannot be served (its port is taken) is no reason to end a run.
        vital=service != "gateway",
        final_errors=frozenset(final_errors),
    )
