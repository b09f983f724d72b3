"""Checks of this machine against a run file: installed packages, devices, and memory for the generators' caches."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from rollmesh.config import RunConfig
from rollmesh.errors import ConfigError
from rollmesh.launcher.run_hints import model_memory
from rollmesh.runtime.capacity import available_memory

_GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/dev/nvhost-gpu")
_GPU_QUERY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
_GPU_QUERY_SECONDS = 20.0
_OBJECT_STORES = {"s3": "s3fs", "gs": "gcsfs"}
_SOURCE_PACKAGES = {"parquet": ("pyarrow", "datasets"), "reasoning_gym": ("reasoning_gym", "reward")}


def check_machine(config: RunConfig) -> None:
    """Raise ConfigError unless this machine has the packages, the devices and the memory that a run needs."""
    for field, package, extra in _packages(config):
        if not _is_installed(package):
            raise ConfigError(f"{field}: requires the package {package}: pip install 'rollmesh[{extra}]'")
    _check_devices(config)
    _check_cache(config)
    _check_folder(config)


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


def _has_gpu() -> bool:
    return any(Path(device).exists() for device in _GPU_DEVICES)


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


def _check_devices(config: RunConfig) -> None:
    """Reject ``cuda`` on a machine without any GPU. Another driver than NVIDIA's or AMD's is left to torch."""
    if sys.platform != "linux" or _has_gpu():
        return
    for field, device in (("generator.device", config.generator.device), ("trainer.device", config.trainer.device)):
        if device == "cuda":
            raise ConfigError(f"{field}=cuda: this machine has no GPU device; set auto or cpu, or start it elsewhere")


def _check_cache(config: RunConfig) -> None:
    """Reject a cache of the torch engine that this machine can never hold; an SGLang server sizes its own."""
    generator = config.generator
    if generator.engine != "torch" or generator.replicas == 0:
        return
    memory, available, where = model_memory(config), _device_bytes(generator.device), _device_name(generator.device)
    if available is None or memory.weight_bytes + memory.cache_bytes <= available:
        return
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


def _device_name(device: str) -> str:
    return "a GPU of this machine" if device != "cpu" and _has_gpu() else "this machine"


def _device_bytes(device: str) -> int | None:
    """Return the memory of the device that a generator uses here; None if it is unknown."""
    if device == "cpu" or not _has_gpu():
        limits = (psutil.virtual_memory().total, available_memory())
        return min(limit for limit in limits if limit is not None)
    if shutil.which(_GPU_QUERY[0]) is None:
        return None
    try:
        done = subprocess.run(_GPU_QUERY, capture_output=True, text=True, timeout=_GPU_QUERY_SECONDS, check=True)
        return max(int(line) for line in done.stdout.split()) << 20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
