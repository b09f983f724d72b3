"""The engine that a run file names."""

from __future__ import annotations

from rollmesh.config.run import RunConfig
from rollmesh.generator.engines.protocol import Engine


def build_engine(config: RunConfig) -> Engine:
    """Build the engine, not started. Engines bring heavy imports, so only the one that is used is imported."""
    import torch

    from rollmesh.generator.engines.torch.engine import TorchEngine
    from rollmesh.generator.engines.torch.options import TorchEngineOptions

    torch.set_num_threads(config.launcher.torch_threads)
    return TorchEngine(TorchEngineOptions.from_config(config))
