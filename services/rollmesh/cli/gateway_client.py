"""Client of a run's gateway, found through the run folder or a URL."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from rollmesh.checkpoints.api_token import known_token
from rollmesh.cli.common import run_of
from rollmesh.config import RunConfig
from rollmesh.errors import ConfigError, RollmeshError
from rollmesh.launcher.run_folder import RunFolder, has_launcher
from rollmesh.runtime.endpoints import read_endpoints
from rollmesh.runtime.port_security import OPEN, PortSecurity

TOKEN_VARIABLE = "ROLLMESH_GATEWAY__TOKEN"


M = TypeVar("M", bound=BaseModel)


class GatewayError(RollmeshError, RuntimeError):
    """Error of a gateway that is unreachable or rejects a request."""


def _remedy(config: RunConfig, folder: RunFolder) -> str:
    """Return the way to a gateway: with the run, or beside it where the queue is not the launcher's own."""
    if config.network.shared_folder and not has_launcher(folder.path):
        return f"the run is not in progress: rollmesh status {folder.path} shows its result, rollmesh up continues it"
    if config.store.url is None:
        return "the run was started without one: stop it and start it again with --set gateway.enabled=true"
    return "rollmesh up starts one with a run (gateway.enabled), rollmesh gateway RUN.yaml starts one separately"


class GatewayClient:
    """REST client of one gateway. Every method raises GatewayError with the message of the gateway."""

    def __init__(self, url: str, token: str | None, security: PortSecurity = OPEN) -> None:
        self.url = url.rstrip("/")
        self.token = token
        tls = security.tls
        # The certificates of the mesh use one server name for every process, independent of its address.
        self._extensions: dict[str, Any] = {} if tls is None else {"sni_hostname": tls.server_name}
        verify = True if tls is None else tls.client_context()
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        # Ignore proxies of the environment: most gateways listen on loopback.
        self._client = httpx.AsyncClient(verify=verify, headers=headers, timeout=5.0, trust_env=False)

    @classmethod
    def of(cls, run: Path | None, url: str | None) -> Self:
        """Return a client for ``url``, or for the gateway of the run folder. Raises ConfigError without a gateway."""
        if url is not None:
            return cls(url, os.environ.get(TOKEN_VARIABLE, "").strip() or None)
        if run is None:
            raise ConfigError("name a run folder, or the gateway's address with --url")
        config, folder = run_of(run)
        endpoints = read_endpoints(folder.path, "gateway")
        if not endpoints:
            raise ConfigError(f"{folder.path}: no gateway runs; {_remedy(config, folder)}")
        return cls(endpoints[0].url, known_token(config), PortSecurity.from_config(config.security))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def read(self, path: str, model: type[M], method: str = "GET") -> M:
        """Return the response of a request to ``/api/v1/<path>`` as a ``model``."""
        body = await self.request(path, method)
        try:
            return model.model_validate_json(body)
        except ValidationError as error:
            address = f"{self.url}/api/v1/{path}"
            raise GatewayError(f"{address}: no rollmesh gateway of this version answers there") from error

    async def request(self, path: str, method: str = "GET") -> bytes:
        """Return the body of the response of a request to ``/api/v1/<path>``."""
        address = f"{self.url}/api/v1/{path}"
        try:
            answer = await self._client.request(method, address, extensions=self._extensions)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise GatewayError(f"{address}: {error or type(error).__name__}") from error
        if answer.is_success:
            return answer.content
        try:
            body = answer.json()
            message = f"{body['error']}" + (f" ({body['hint']})" if body.get("hint") else "")
        except (ValueError, KeyError, TypeError):
            message = answer.text[:200]
        raise GatewayError(f"{method} {address}: {answer.status_code}: {message}")
