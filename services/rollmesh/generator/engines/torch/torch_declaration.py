"""Declaration of the embedded torch engine."""

from __future__ import annotations

from rollmesh.config import RunConfig
from rollmesh.generator.engines.adapter_folder import AdapterSettings
from rollmesh.generator.engines.engine_protocol import Engine, EngineDeclaration
from rollmesh.runtime.imports import many_imports


def _build(config: RunConfig, _index: int) -> Engine:
    with many_imports():
        import torch

        from rollmesh.generator.engines.torch.torch_engine import TorchEngine

    torch.set_num_threads(config.launcher.torch_threads)
    return TorchEngine(config.generator, config.model.dtype, AdapterSettings.from_config(config))


TORCH = EngineDeclaration(build=_build)
