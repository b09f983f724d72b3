"""Flags with which an SGLang server serves the adapters of a run. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollmesh.errors import ConfigError
from rollmesh.generator.engines.adapter_folder import AdapterSettings

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
