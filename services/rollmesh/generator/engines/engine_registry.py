"""Registry of the engines, by their names in ``generator.engine``; importing it loads no engine."""

from __future__ import annotations

from collections.abc import Mapping

from rollmesh.config import RunConfig
from rollmesh.generator.engines.engine_protocol import Engine, EngineDeclaration
from rollmesh.generator.engines.sglang.sglang_declaration import SGLANG
from rollmesh.generator.engines.torch.torch_declaration import TORCH

ENGINES: Mapping[str, EngineDeclaration] = {"torch": TORCH, "sglang": SGLANG}


def build_engine(config: RunConfig, index: int = 0) -> Engine:
    """Build the engine that the run file selects for generator number ``index``, not started."""
    return ENGINES[config.generator.engine].build(config, index)
