"""Construction of the engine that the run file selects."""

from __future__ import annotations

from rollmesh.config.run import RunConfig
from rollmesh.generator.engines.engine_protocol import Engine
from rollmesh.runtime.imports import many_imports


def build_engine(config: RunConfig, index: int = 0) -> Engine:
    """Build the engine of the run's generator number ``index``, not started.

    Engines have heavy imports, so only the selected one is imported.
    """
    if config.generator.engine == "sglang":
        from rollmesh.generator.engines.sglang.sglang_engine import SglangEngine
        from rollmesh.generator.engines.sglang.sglang_options import SglangOptions

        return SglangEngine(SglangOptions.from_config(config, index))
    with many_imports():
        import torch

        from rollmesh.generator.engines.torch.torch_engine import TorchEngine
        from rollmesh.generator.engines.torch.torch_options import TorchEngineOptions

    torch.set_num_threads(config.launcher.torch_threads)
    return TorchEngine(TorchEngineOptions.from_config(config))
