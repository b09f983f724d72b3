"""Bearer token for the service ports of one run, used without a token or certificates in the run file.

Loopback ports are open to every user of the machine: one call could run code as the run's owner, or stop the run. The
token is a file of the run folder (mode 0600), and the services of the run receive its path.
"""

from __future__ import annotations

from rollmesh.checkpoints.sealing import random_once
from rollmesh.config import RunConfig
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.runtime.port_security import is_loopback

TOKEN_FILE = "mesh-token"


def with_mesh_token(config: RunConfig, folder: RunFolder) -> RunConfig:
    """Return the config with the token of the run, created if missing; ``/metrics`` stays open for a local Prometheus.

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
