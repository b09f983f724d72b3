"""Options of the SGLang engine: command line and environment of a started server, settings of a running one."""

import json
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollmesh.config import RunConfig
from rollmesh.config.generator import ARGMAX_DEVICES, GeneratorConfig, SglangConfig, speculation_problem
from rollmesh.errors import ConfigError
from rollmesh.generator.engines.policy_folders import AdapterSettings
from rollmesh.types import SamplingParams

_SPARE_TOKENS = 8
"""Positions of its context length that the server reserves; a call never reaches them."""
_SPARE_CACHE_TOKENS = 1024
"""Key-value cache tokens that the server reserves or loses to page rounding; added to the capacity for calls."""
_CANARY_ROWS = 8
"""Requests in addition to the calls: a canary must not wait until a call ends."""
_WATCHDOG_SECONDS = "86400"
_SECRET_PREFIX = "ROLLMESH_"
_NO_PROXY = ("no_proxy", "NO_PROXY")
_LOOPBACK = "127.0.0.1,localhost"
_PYTHON_VARIABLES = frozenset({"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangOptions:
    """Options of one generator's server and its use."""

    generator: GeneratorConfig
    dtype: str = "float32"
    adapter: AdapterSettings | None = None
    """Adapters of the run; None serves full weights."""
    frozen: bool = False
    """Whether the weights never change: a server at ``url`` must then have been started with their folder."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Sampling parameters of training rollouts."""
    admin_key: str | None = None
    """Key of the server's endpoints; None sends none."""
    log_file: Path = Path("sglang.log")
    """Log file of a started server."""
    probe_seconds: float = 5.0
    """Time between two probes of the server."""

    @classmethod
    def from_config(cls, config: RunConfig, index: int) -> "SglangOptions":
        server = config.generator.sglang
        key = server.admin_key.get_secret_value() if server.admin_key is not None else None
        return cls(
            generator=config.generator,
            dtype=config.model.dtype,
            adapter=AdapterSettings.from_config(config),
            sampling=config.rollout.sampling(config.seed, ()),
            admin_key=secrets.token_hex(16) if key is None and server.url is None else key,
            log_file=Path(config.folder) / "logs" / f"sglang-{index}.log",
        )

    @property
    def server(self) -> SglangConfig:
        return self.generator.sglang

    @property
    def key_file(self) -> Path:
        """File with the key of a started server; every user of the machine can read command-line arguments."""
        return self.log_file.with_suffix(".key.yaml")

    def key_text(self) -> str:
        """Return the key file's content: both keys, as the admin key alone leaves /generate open to the machine."""
        return json.dumps({"api-key": self.admin_key, "admin-api-key": self.admin_key})  # JSON is YAML

    @property
    def pause_mode(self) -> str:
        """Mode in which a pause holds running requests.

        ``in_place`` keeps their cache, but the server's watchdog kills a server after minutes in that state.
        ``retract`` prefills them again and has no time limit.
        """
        return "in_place" if self.generator.on_new_version == "keep_kv" else "retract"

    def command(self, folder: Path, policy_version: int, port: int, targets: Sequence[str] = ()) -> list[str]:
        """Build the command that serves ``folder`` on a loopback port; ``targets`` are the layers of its adapters."""
        generator = self.generator
        flags = {
            "--model-path": str(folder),
            "--weight-version": str(policy_version),
            "--host": "127.0.0.1",
            "--port": str(port),
            "--dtype": self.dtype,
            "--context-length": str(self._context_length),
            "--max-running-requests": str(generator.slots + _CANARY_ROWS),
            "--max-total-tokens": str(generator.kv_tokens + _SPARE_CACHE_TOKENS),
        }
        if generator.device != "auto":
            flags["--device"] = generator.device
        if generator.device == "cpu" and not self._has_argument("--attention-backend"):
            flags["--attention-backend"] = "torch_native"
        if generator.device == "cpu" and self.adapter is not None and not self._has_argument("--lora-backend"):
            flags["--lora-backend"] = "torch_native"
        if not self._has_argument("--log-level-http"):
            flags["--log-level-http"] = "warning"  # otherwise the server logs a line for every slice
        if self.admin_key is not None:
            flags["--config"] = str(self.key_file)
        # Token ids in and out. Without the second flag an idle scheduler spins on a core.
        bare = ["--skip-tokenizer-init", "--sleep-on-idle"]
        if generator.on_new_version == "keep_kv":
            # A step in progress during the swap would be stamped with the wrong version.
            bare.append("--disable-overlap-schedule")
            if not self._has_argument("--watchdog-timeout"):
                flags["--watchdog-timeout"] = _WATCHDOG_SECONDS  # the watchdog takes a pause in place for a hang
        if self.adapter is not None:
            bare += lora_flags(self.adapter, targets, generator.slots)
        pairs = [part for pair in flags.items() for part in pair]
        python = self.server.python or sys.executable
        return [python, "-m", "sglang.launch_server", *pairs, *bare, *self.server.arguments]

    def server_environment(self, inherited: dict[str, str]) -> dict[str, str]:
        """Build the environment of a started server: ``inherited`` without secrets and Python, plus the run file's."""
        kept = {k: v for k, v in inherited.items() if not k.startswith(_SECRET_PREFIX)}
        if self.server.python is not None:
            kept = {k: v for k, v in kept.items() if k not in _PYTHON_VARIABLES}
        kept["PYTHONSAFEPATH"] = "1"  # -P of its processes; an older interpreter has no -P
        kept["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # for _SPARE_TOKENS, which no call reaches
        kept["SGLANG_RETURN_ORIGINAL_LOGPROB"] = "0"  # log-probabilities at the sampling temperature
        # Far longer than the client's: a server that closes an idle connection first may cut off a request.
        kept["SGLANG_TIMEOUT_KEEP_ALIVE"] = "75"
        if self.generator.device == "cpu":
            kept["SGLANG_USE_CPU_ENGINE"] = "1"
        # At its start the server sends itself a request, which must not go to an HTTP proxy.
        kept |= {name: _with_loopback(inherited.get(name) or inherited.get(name.swapcase(), "")) for name in _NO_PROXY}
        return kept | self.server.environment

    def cache_tokens(self, info: Mapping[str, Any], url: str, targets: Sequence[str] = ()) -> int:
        """Return the cache capacity from a /server_info response, in tokens; ConfigError for an impossible setting."""
        check_speculation(info, url)
        if self.server.url is not None:
            self._check_running_server(info)
            if self.adapter is not None:
                check_lora_server(info, url, self.adapter, targets)
        capacity = int(info.get("max_total_num_tokens") or 0)
        # The server rounds a context up to whole pages and keeps one back.
        room = self._context_length + 2 * int(info.get("page_size") or 1)
        if 0 < capacity < room:
            raise ConfigError(
                f"the SGLang server at {url} has a key-value cache of {capacity} tokens; generator.max_context_tokens="
                f"{self.generator.max_context_tokens} needs {room}: decrease it, or enlarge the cache "
                "(--mem-fraction-static, --max-total-tokens)"
            )
        return capacity

    def _check_running_server(self, info: Mapping[str, Any]) -> None:
        generator, context = self.generator, info.get("context_length")
        if isinstance(context, int) and context < self._context_length:
            raise ConfigError(
                f"the SGLang server at {self.server.url} has --context-length {context}; "
                f"generator.max_context_tokens={generator.max_context_tokens} needs {self._context_length}"
            )
        if generator.on_new_version == "keep_kv" and info.get("disable_overlap_schedule") is False:
            raise ConfigError(
                f"generator.on_new_version=keep_kv: the SGLang server at {self.server.url} must run with "
                "--disable-overlap-schedule, or a token in flight is stamped with the wrong policy version"
            )

    @property
    def _context_length(self) -> int:
        return self.generator.max_context_tokens + _SPARE_TOKENS

    def _has_argument(self, flag: str) -> bool:
        return any(a == flag or a.startswith(f"{flag}=") for a in self.server.arguments)


def check_speculation(info: Mapping[str, Any], url: str) -> None:
    """Raise ConfigError if the drafts of a server change what it samples; ``info`` is its /server_info."""
    algorithm, device = str(info.get("speculative_algorithm") or ""), info.get("device")
    thresholds = [info.get(f"speculative_accept_threshold_{name}", 1.0) for name in ("single", "acc")]
    reason = speculation_problem(algorithm, thresholds)
    if algorithm and not reason and device != "cuda":
        reason = f"its device is {device}: {ARGMAX_DEVICES}"
    if reason:
        raise ConfigError(
            f"the SGLang server at {url} was started with --speculative-algorithm {algorithm}: {reason}; leave it out"
        )


def _with_loopback(hosts: str) -> str:
    """Add the loopback hosts to a list of hosts without a proxy; ``*`` includes every host, but only by itself."""
    return hosts if hosts.strip() == "*" else ",".join(filter(None, (hosts, _LOOPBACK)))


_BESIDE_KEPT = 2
"""Policies in a batch besides the kept adapters: the base, and the adapter that the canary scores."""


def lora_flags(settings: AdapterSettings, targets: Sequence[str], slots: int) -> list[str]:
    """Return the flags of a server for these adapters; ``targets`` are the names of the adapted layers."""
    at_once = settings.kept_versions + _BESIDE_KEPT
    return [
        "--enable-lora",
        "--lora-strict-loading",  # a server would ignore tensors that are missing
        *("--max-lora-rank", str(settings.config.rank)),
        *("--max-loras-per-batch", str(at_once)),
        # Every running slice may name another version; beyond the limit the server would unload one by itself.
        *("--max-loaded-loras", str(at_once + slots)),
        *("--lora-target-modules", *targets),
    ]


def check_lora_server(info: Mapping[str, Any], url: str, settings: AdapterSettings, targets: Sequence[str]) -> None:
    """Raise ConfigError with the flag to add, unless a running server can serve the adapters of the run.

    ``info`` is its /server_info.
    """
    rank, loaded = settings.config.rank, settings.kept_versions + _BESIDE_KEPT
    served = set(info.get("lora_target_modules") or ())
    missing = [] if "all" in served else [name for name in targets if name not in served]
    found_rank, found_loaded = info.get("max_lora_rank"), info.get("max_loaded_loras")
    replicas = info.get("dp_size") or 1
    if replicas > 1:
        problem = f"with --dp-size {replicas}, which cannot load adapters while it runs (leave it out)"
    elif not info.get("enable_lora"):
        problem = "without --enable-lora"
    elif found_rank is None or found_rank < rank:
        problem = f"with --max-lora-rank {found_rank}, but model.adapter.rank={rank}"
    elif missing:
        problem = f"with --lora-target-modules {' '.join(sorted(served))}, but the adapters have {missing[0]}, too"
    elif not info.get("lora_strict_loading"):
        problem = "without --lora-strict-loading, so it would ignore missing tensors"
    elif found_loaded is not None and found_loaded < loaded:
        problem = f"with --max-loaded-loras {found_loaded}, but the run keeps up to {loaded} adapters"
    else:
        return
    flags = (
        f"--enable-lora --lora-strict-loading --max-lora-rank {rank} --max-loaded-loras {loaded} "
        f"--lora-target-modules {' '.join(targets)}"
    )
    raise ConfigError(f"the SGLang server at {url} was started {problem}; start it with {flags}")
