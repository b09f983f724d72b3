"""Network section: addresses of the services of a run, and their discovery without a shared run folder."""

from __future__ import annotations

from pydantic import Field

from rollmesh.config.section import Section


class NetworkConfig(Section):
    """Addresses of one service process.

    The defaults are for a run on one machine; pods set them with environment variables (ROLLMESH_NETWORK__...).
    ``rollmesh up`` starts many processes from one run file, so it always picks free ports.
    """

    host: str | None = None
    """Address to bind to, for example 0.0.0.0 or ::; null is launcher.host."""
    grpc_port: int = Field(default=0, ge=0, le=65535)
    """Port of the gRPC server; 0 picks a free one."""
    admin_port: int = Field(default=0, ge=0, le=65535)
    """Port of /metrics, /healthz and /readyz; 0 picks a free one."""
    advertise_host: str | None = None
    """Name or address under which other services reach this process, for example the pod's IP; null is the bound host,
    which then must not be a wildcard."""
    instance: str | None = Field(default=None, min_length=1, max_length=253)
    """Name of this process in logs and in the registry, for example the pod's name; null is <service>-<index>."""
    shared_folder: bool = True
    """Whether all services share this run folder. Set false in pods: each service then requires those of
    reward.address, store.url, checkpoints.folder and checkpoints.secret that it uses, and fails at startup without
    them."""
