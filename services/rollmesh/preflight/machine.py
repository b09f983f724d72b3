"""Checks of this machine against a run file: packages, devices, memory for the caches, folders, ports, Redis."""

import asyncio
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from rollmesh.config import RunConfig
from rollmesh.errors import ConfigError, StoreError
from rollmesh.preflight.run_model import ModelMemory
from rollmesh.runtime.addresses import bind_host
from rollmesh.runtime.capacity import available_memory, has_gpu
from rollmesh.runtime.locks import has_launcher
from rollmesh.store import TrajectoryStore

PORT_SECONDS = 3.0
"""Wait for the port of the agents service to become free."""
_REDIS_SECONDS = 4.0
"""Wait for the server of ``store.url``."""
_POLL_SECONDS = 0.1
_GPU_QUERY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
_GPU_QUERY_SECONDS = 20.0
_OBJECT_STORES = {"s3": "s3fs", "gs": "gcsfs"}
_SOURCE_PACKAGES = {"parquet": ("pyarrow", "datasets"), "reasoning_gym": ("reasoning_gym", "reward")}


def check_machine(config: RunConfig, memory: ModelMemory) -> None:
    """Raise ConfigError unless this machine has the packages, the devices and the memory that a run needs."""
    for field, package, extra in _packages(config):
        if not _is_installed(package):
            raise ConfigError(f"{field}: requires the package {package}: pip install 'rollmesh[{extra}]'")
    # Another driver than NVIDIA's or AMD's is left to torch.
    teachers = ((f"teachers.{n}.device", each.device) for n, each in config.teachers.items() if each.address is None)
    devices = (("generator.device", config.generator.device), ("trainer.device", config.trainer.device), *teachers)
    for field, device in devices:
        if device == "cuda" and sys.platform == "linux" and not has_gpu():
            raise ConfigError(f"{field}=cuda: this machine has no GPU device; set auto or cpu, or start it elsewhere")
    _check_cache(config, memory)
    _check_folder(config)


def port_notes(config: RunConfig) -> list[str]:
    """Check addresses and fixed ports; a run without a page goes on.

    Raises ConfigError for an address that no service can bind, and if an agent run would have no API.
    """
    if has_launcher(Path(config.folder).resolve()):
        return []  # a live run of the folder has its ports; its lock refuses a second launcher
    field = "network.host" if config.network.host else "launcher.host"
    fallback = bind_host(config)
    if problem := _taken(fallback, 0):
        raise ConfigError(f"{field}={fallback}: {problem}; set an address of this machine, IPv6 without brackets")
    gateway_host = config.gateway.host or fallback
    agents, first = config.rollout.program == "agent" and config.agents.enabled is not False, config.agents.port
    for number in range(agents and (config.launcher.agents_replicas if first else 1)):
        # A service of a killed launcher may hold the port until it has noticed.
        if problem := _taken(config.agents.host or gateway_host, first + number, PORT_SECONDS):
            which = f"{first} + {number} (launcher.agents_replicas)" if number else f"{first}"
            raise ConfigError(
                f"agents.port={which}: {problem}, and this run needs the API; set another port (0 for any) or "
                "agents.host"
            )
    if config.gateway.enabled and (problem := _taken(gateway_host, config.gateway.port)):
        return [
            f"gateway.port={config.gateway.port}: {problem}; the run will have no page: set another port (0 for any), "
            "or gateway.host"
        ]
    return []


def check_redis(config: RunConfig) -> None:
    """Connect to the Redis of ``store.url``. Raises ConfigError if it does not answer, or cannot hold the queue.

    A run that starts waits for it instead.
    """
    url = config.store.url
    if url is None or not config.network.shared_folder:
        return

    async def connect() -> None:
        await (await TrajectoryStore.connect(config.store, config.name, retry_seconds=_REDIS_SECONDS)).aclose()

    try:
        asyncio.run(connect())
    except StoreError as error:
        raise ConfigError(
            f"store.url={url}: {str(error).removeprefix('INFO: ')}; start that server, or correct the address"
        ) from error


def _packages(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield field, package and extra of everything optional that the services of a run import."""
    for package in ("torch", "transformers", "safetensors"):
        yield f"trainer.device={config.trainer.device}", package, "torch"
    if config.trainer.optimizer == "adamw_8bit":
        yield "trainer.optimizer=adamw_8bit", "bitsandbytes", "bitsandbytes"
    for tracker in config.telemetry.trackers:
        yield f"telemetry.trackers: {tracker}", tracker, tracker
    if config.telemetry.otlp_endpoint is not None:
        for package in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
            yield f"telemetry.otlp_endpoint={config.telemetry.otlp_endpoint}", package, "tracing"
    if config.checkpoints.remote:
        scheme = str(config.checkpoints.folder).partition("://")[0]
        yield f"checkpoints.folder={config.checkpoints.folder}", _OBJECT_STORES[scheme], scheme
    for name, source in config.data.sources.items():
        if source.type in _SOURCE_PACKAGES:
            yield f"data.{name}.type={source.type}", *_SOURCE_PACKAGES[source.type]
    if config.reward.verifier == "math":
        yield "reward.verifier=math", "math_verify", "reward"


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # a package above it is missing
        return False


def _check_cache(config: RunConfig, memory: ModelMemory) -> None:
    """Reject a cache of the torch engine that this machine can never hold; an SGLang server sizes its own."""
    generator = config.generator
    if generator.engine != "torch" or generator.replicas == 0:
        return
    available = _device_bytes(generator.device)
    if available is None or memory.weight_bytes + memory.cache_bytes <= available:
        return
    where = "a GPU of this machine" if generator.device != "cpu" and has_gpu() else "this machine"
    size = (
        f"generator.kv_token_capacity={generator.kv_token_capacity}"
        if generator.kv_token_capacity
        else f"generator.slots={generator.slots} with generator.max_context_tokens={generator.max_context_tokens}"
    )
    raise ConfigError(
        f"{size}: {memory.cache_bytes / 1e9:,.1f} GB of cache and {memory.weight_bytes / 1e9:,.1f} GB of weights in "
        f"each generator, but {where} has {available / 1e9:,.1f} GB: lower generator.slots, or set "
        "generator.kv_token_capacity"
    )


def _device_bytes(device: str) -> int | None:
    """Return the memory of the device that a generator uses here; None if it is unknown."""
    if device == "cpu" or not has_gpu():
        limits = (psutil.virtual_memory().total, available_memory())
        return min(limit for limit in limits if limit is not None)
    if shutil.which(_GPU_QUERY[0]) is None:
        return None
    try:
        done = subprocess.run(_GPU_QUERY, capture_output=True, text=True, timeout=_GPU_QUERY_SECONDS, check=True)
        return max(int(line) for line in done.stdout.split()) << 20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _check_folder(config: RunConfig) -> None:
    """Reject a folder of checkpoints that no service could create: each would end and be started again."""
    place = config.checkpoints
    field = "checkpoints.cache_folder" if place.remote else "checkpoints.folder"
    folder = place.cache_folder if place.remote else place.folder
    if folder is None:
        return
    path = Path(folder).absolute()
    above = next(each for each in (path, *path.parents) if os.path.exists(each))
    if not above.is_dir():
        raise ConfigError(f"{field}={folder}: {above} is no folder; name another one")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"{field}={folder}: this user cannot write to {above}; name another folder")


def _taken(host: str, port: int, seconds: float = 0.0) -> str:
    """Return the reason why a port (0: any) cannot be bound within ``seconds``; empty if it can."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
                return ""
        except OverflowError:
            return "no port is above 65535"
        except OSError as error:
            if time.monotonic() >= deadline:
                return f"{host} refuses it ({error.strerror})"
            time.sleep(_POLL_SECONDS)
