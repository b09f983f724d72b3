"""Options of the SGLang engine."""

from __future__ import annotations

import json
import secrets
import sys
from dataclasses import dataclass, field
from pathlib import Path

from rollmesh.config.run import RunConfig
from rollmesh.errors import ConfigError

SPARE_TOKENS = 8
"""Positions of its context length that the server reserves; a call never reaches them."""
_SPARE_CACHE_TOKENS = 1024
"""Key-value cache tokens that the server reserves or loses to page rounding; added to the capacity for calls."""
_CANARY_ROWS = 8
"""Requests in addition to the calls: a canary must not wait until a call ends."""
_WATCHDOG_SECONDS = "86400"
_SECRET_PREFIX = "ROLLMESH_"
_PYTHON_VARIABLES = frozenset({"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangOptions:
    """Options of one server and its use."""

    slots: int
    """Maximum number of requests decoded at once."""
    max_context_tokens: int
    """Maximum tokens of prompt plus response of one call."""
    kv_token_capacity: int | None = None
    """Tokens of key-value cache; None is slots * max_context_tokens."""
    device: str = "auto"
    dtype: str = "float32"
    on_new_version: str = "interrupt"
    url: str | None = None
    """URL of a running server; None starts one."""
    python: str | None = None
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    interrupt: str = "retract"
    """``retract`` or ``abort``: effect of an interrupting load on running requests."""
    start_timeout_seconds: float = 600.0
    request_timeout_seconds: float = 300.0
    update_timeout_seconds: float = 600.0
    admin_key: str | None = None
    log_file: Path = Path("sglang.log")
    """Log file of a started server."""
    probe_seconds: float = 5.0
    """Time between two probes of the server."""

    def __post_init__(self) -> None:
        if self.kv_token_capacity is not None and self.kv_token_capacity < self.max_context_tokens:
            raise ConfigError(
                f"generator.kv_token_capacity={self.kv_token_capacity} does not hold one call of "
                f"generator.max_context_tokens={self.max_context_tokens}; increase it or leave it out"
            )

    @classmethod
    def from_config(cls, config: RunConfig, index: int) -> SglangOptions:
        """Build the options of generator number ``index`` from a run file."""
        generator, sglang = config.generator, config.generator.sglang
        key = sglang.admin_key.get_secret_value() if sglang.admin_key is not None else None
        if key is None and sglang.url is None:
            key = secrets.token_hex(16)
        return cls(
            slots=generator.slots,
            max_context_tokens=generator.max_context_tokens,
            kv_token_capacity=generator.kv_token_capacity,
            device=generator.device,
            dtype=config.model.dtype,
            on_new_version=generator.on_new_version,
            url=sglang.url,
            python=sglang.python,
            arguments=tuple(sglang.arguments),
            environment=dict(sglang.environment),
            interrupt=sglang.interrupt,
            start_timeout_seconds=sglang.start_timeout_seconds,
            request_timeout_seconds=sglang.request_timeout_seconds,
            update_timeout_seconds=sglang.update_timeout_seconds,
            admin_key=key,
            log_file=Path(config.folder) / "logs" / f"sglang-{index}.log",
        )

    @property
    def key_file(self) -> Path:
        """File with the key of a started server; every user of the machine can read command-line arguments."""
        return self.log_file.with_suffix(".key.yaml")

    def key_text(self) -> str:
        """Return the content of the key file.

        It sets both keys: the admin key alone would leave /generate open to the machine's users.
        """
        return json.dumps({"api-key": self.admin_key, "admin-api-key": self.admin_key})  # JSON is YAML

    @property
    def pause_mode(self) -> str:
        """Mode in which a pause holds running requests.

        ``in_place`` keeps their cache, but the server's watchdog kills a server after minutes in that state.
        ``retract`` prefills them again and has no time limit.
        """
        return "in_place" if self.on_new_version == "keep_kv" else "retract"

    def command(self, folder: Path, policy_version: int, port: int) -> list[str]:
        """Build the command that serves ``folder`` on a loopback port."""
        cache_tokens = self.kv_token_capacity or self.slots * self.max_context_tokens
        flags = {
            "--model-path": str(folder),
            "--weight-version": str(policy_version),
            "--host": "127.0.0.1",
            "--port": str(port),
            "--dtype": self.dtype,
            "--context-length": str(self.max_context_tokens + SPARE_TOKENS),
            "--max-running-requests": str(self.slots + _CANARY_ROWS),
            "--max-total-tokens": str(cache_tokens + _SPARE_CACHE_TOKENS),
        }
        if self.device != "auto":
            flags["--device"] = self.device
        if self.device == "cpu" and not self._has_argument("--attention-backend"):
            flags["--attention-backend"] = "torch_native"
        if not self._has_argument("--log-level-http"):
            flags["--log-level-http"] = "warning"  # otherwise the server logs a line for every slice
        if self.admin_key is not None:
            flags["--config"] = str(self.key_file)
        # Token ids in and out. Without the second flag an idle scheduler spins on a core.
        bare = ["--skip-tokenizer-init", "--sleep-on-idle"]
        if self.on_new_version == "keep_kv":
            # A step in progress during the swap would be stamped with the wrong version.
            bare.append("--disable-overlap-schedule")
            if not self._has_argument("--watchdog-timeout"):
                flags["--watchdog-timeout"] = _WATCHDOG_SECONDS  # the watchdog takes a pause in place for a hang
        pairs = [part for pair in flags.items() for part in pair]
        python = self.python or sys.executable
        return [python, "-m", "sglang.launch_server", *pairs, *bare, *self.arguments]

    def server_environment(self, inherited: dict[str, str]) -> dict[str, str]:
        """Build the environment of a started server: ``inherited`` without secrets and Python, plus the run file's."""
        kept = {k: v for k, v in inherited.items() if not k.startswith(_SECRET_PREFIX)}
        if self.python is not None:
            kept = {k: v for k, v in kept.items() if k not in _PYTHON_VARIABLES}
        kept["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # for SPARE_TOKENS, which no call reaches
        kept["SGLANG_RETURN_ORIGINAL_LOGPROB"] = "0"  # log-probabilities at the sampling temperature
        if self.device == "cpu":
            kept["SGLANG_USE_CPU_ENGINE"] = "1"
        return kept | self.environment

    def _has_argument(self, flag: str) -> bool:
        return any(a == flag or a.startswith(f"{flag}=") for a in self.arguments)
