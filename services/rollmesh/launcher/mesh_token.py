"""A bearer token per run for the ports of its services, where the run file names neither a token nor certificates.

Loopback ports are open to every user of the machine: one call could run code as the run's owner, or stop the run. The
token lies in the run folder (mode 0600), and the services of the run are told where.
"""

from __future__ import annotations

from rollmesh.checkpoints.sealing import random_once
from rollmesh.config import RunConfig
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.runtime.port_security import is_loopback

TOKEN_FILE = "mesh-token"


def with_mesh_token(config: RunConfig, folder: RunFolder) -> RunConfig:
    """The config with the run's own token, made if need be. ``/metrics`` stays open, for a Prometheus of this machine.

    Unchanged with a token or certificates in the run file, and when the services listen beyond this machine: there
    they may work with others that were started by hand.
    """
    security = config.security
    chosen = security.token is not None or security.token_file is not None or security.tls.enabled
    if chosen or not is_loopback(f"{config.launcher.host}:0"):
        return config
    file = folder.path / TOKEN_FILE
    random_once(file)
    own = security.model_copy(update={"token_file": str(file), "open_metrics": True})
    return config.model_copy(update={"security": own})
