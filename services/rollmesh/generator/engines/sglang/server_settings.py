"""Check of an SGLang server's settings against the run: a pure function of the /server_info response."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollmesh.errors import ConfigError
from rollmesh.generator.engines.sglang.sglang_options import SPARE_TOKENS, SglangOptions


def check_settings(info: Mapping[str, Any], options: SglangOptions, url: str) -> int:
    """Return the capacity of the server's key-value cache in tokens; ConfigError names a setting that cannot work."""
    longest = options.max_context_tokens
    need = longest + SPARE_TOKENS
    if options.url is not None:
        _check_running_server(info, options, need)
    capacity = int(info.get("max_total_num_tokens") or 0)
    # The server rounds a context up to whole pages and keeps one back.
    room = need + 2 * int(info.get("page_size") or 1)
    if 0 < capacity < room:
        raise ConfigError(
            f"the SGLang server at {url} has a key-value cache of {capacity} tokens; generator.max_context_tokens="
            f"{longest} needs {room}: decrease it, or enlarge the cache (--mem-fraction-static, --max-total-tokens)"
        )
    return capacity


def _check_running_server(info: Mapping[str, Any], options: SglangOptions, need: int) -> None:
    """Check the settings of a server at a url; a started server gets them from its command line."""
    context = info.get("context_length")
    if isinstance(context, int) and context < need:
        raise ConfigError(
            f"the SGLang server at {options.url} has --context-length {context}; "
            f"generator.max_context_tokens={options.max_context_tokens} needs {need}"
        )
    if options.on_new_version == "keep_kv" and info.get("disable_overlap_schedule") is False:
        raise ConfigError(
            f"generator.on_new_version=keep_kv: the SGLang server at {options.url} must run with "
            "--disable-overlap-schedule, or a token in flight is stamped with the wrong policy version"
        )
