"""Section ``generator.sglang``: the SGLang server of a generator, and the engine's rules for other fields.

It is in this package because the run file is validated before any engine is imported, and ``config`` imports no engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from rollmesh.config.section import EngineSection, Secret

_OWN_FLAGS = frozenset(
    {
        "--model-path", "--model", "--host", "--port", "--api-key", "--admin-api-key", "--skip-tokenizer-init",
        "--weight-version", "--context-length", "--config", "--max-running-requests", "--max-total-tokens", "--dtype",
        "--device", "--enable-lora", "--lora-strict-loading", "--max-lora-rank", "--max-loras-per-batch",
        "--max-loaded-loras", "--lora-target-modules", "--lora-paths",
    }
)  # fmt: skip
_DATA_PARALLEL_FLAGS = ("--dp-size", "--data-parallel-size")
_STARTED_ONLY = ("python", "arguments", "environment")


class SglangConfig(EngineSection):
    """The SGLang server behind ``generator.engine: sglang``."""

    rollout_defaults: ClassVar[Mapping[str, Any]] = {"partial_save_tokens": 1024}
    """A save ends a slice of a call, which costs a server some milliseconds."""

    url: str | None = None
    """http(s):// address of a running server that reads the same checkpoint folder; null starts a server."""
    python: str | None = None
    """Python interpreter of the environment with SGLang; null is the interpreter of rollmesh."""
    arguments: list[str] = Field(default_factory=list)
    """Further flags of the server, for example ["--tp-size", "8"]; flags that rollmesh sets are rejected."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the server, added to those of this process."""
    interrupt: Literal["retract", "abort"] = "retract"
    """Effect of on_new_version=interrupt on running requests: retract prefills them again with the new weights and
    continues, abort ends them as interrupted."""
    start_timeout_seconds: float = Field(default=600.0, gt=0)
    """Time limit for a started server to become ready, loading included, or for the server at ``url`` to be
    reachable."""
    request_timeout_seconds: float = Field(default=300.0, gt=0)
    """Time limit for one slice of a call (rollout.partial_save_tokens tokens), without the time in a paused server."""
    update_timeout_seconds: float = Field(default=600.0, gt=0)
    """Time limit for the server to load a policy from disk."""
    admin_key: Secret = None
    """Key of the server's endpoints. null creates a key per process for a started server, and sends none to a server at
    ``url``. Preferably from ROLLMESH_GENERATOR__SGLANG__ADMIN_KEY."""

    @model_validator(mode="after")
    def _the_server_is_started_or_found(self) -> Self:
        if self.url is not None:
            if not self.url.startswith(("http://", "https://")):
                raise ValueError(f"generator.sglang.url={self.url}: expected http:// or https://")
            if self.url.startswith("http://") and _is_public(self.url):
                raise ValueError(
                    f"generator.sglang.url={self.url}: HTTP would send the key and every token unencrypted over a "
                    "public network; use https://, or a private address"
                )
            for name in _STARTED_ONLY:
                if getattr(self, name):
                    raise ValueError(
                        f"generator.sglang.{name} is for a server that rollmesh starts; "
                        f"generator.sglang.url={self.url} is a running server; leave one of the two out"
                    )
        return self

    @model_validator(mode="after")
    def _flags_have_one_owner(self) -> Self:
        for argument in self.arguments:
            flag = argument.split("=", 1)[0]
            # The server accepts abbreviations: --hos is --host.
            owns = sorted(own for own in _OWN_FLAGS if own.startswith(flag)) if len(flag) > 2 else []
            if flag.startswith("--") and owns:
                raise ValueError(
                    f"generator.sglang.arguments: {flag} ({owns[0]}) is set by rollmesh from the run file; leave it out"
                )
        return self

    @property
    def data_parallel_size(self) -> str:
        """Value of --dp-size in ``arguments``; 1 if they do not set it."""
        size = "1"
        for argument, following in zip(self.arguments, [*self.arguments, ""][1:], strict=True):
            flag, _, value = argument.partition("=")
            # The server accepts abbreviations.
            if len(flag) > 3 and any(name.startswith(flag) for name in _DATA_PARALLEL_FLAGS):
                size = value or following
        return size

    def problem(self, field: str, value: Any) -> str:
        server = f"the server at generator.sglang.url={self.url}"
        if field == "pace" and value is not None:
            return "for engine=torch only; leave it out with engine=sglang"
        if field == "cuda_graphs" and value:
            return "for engine=torch only; leave it out, an SGLang server captures its graphs"
        if self.url is not None and field == "replicas" and value > 1:
            return f"generators cannot share {server}, because each loads policies into its server; set 1"
        if self.url is not None and field == "device" and value != "auto":
            return f"{server} has chosen its device; set auto"
        return ""


def _is_public(url: str) -> bool:
    """Tell whether the host of a URL is a public IP address; host names are not resolved."""
    try:
        return ip_address(urlsplit(url).hostname or "").is_global
    except ValueError:
        return False
