"""Options of an SGLang engine from the fields of its three levels in one call."""

from typing import Any

from rollmesh.config.generator import GeneratorConfig, SglangConfig
from rollmesh.generator.engines.sglang.sglang_options import SglangOptions


def sglang_options(**fields: Any) -> SglangOptions:
    """Sort the fields by name into ``generator.sglang``, ``generator`` and the options themselves."""
    own = {name: fields.pop(name) for name in SglangOptions.__dataclass_fields__ if name in fields}
    server = {name: fields.pop(name) for name in SglangConfig.model_fields if name in fields}
    return SglangOptions(generator=GeneratorConfig(engine="sglang", sglang=SglangConfig(**server), **fields), **own)
