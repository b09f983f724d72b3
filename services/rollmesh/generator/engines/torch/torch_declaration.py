"""Declaration of the embedded torch engine."""

from __future__ import annotations

from pathlib import Path

from rollmesh.config import RunConfig
from rollmesh.errors import UnsupportedModel
from rollmesh.generator.engines.adapter_folder import AdapterSettings
from rollmesh.generator.engines.engine_protocol import Engine, EngineDeclaration
from rollmesh.generator.engines.torch.architecture import read_architecture
from rollmesh.runtime.lifecycle import many_imports


def _build(config: RunConfig, _index: int) -> Engine:
    with many_imports():
        import torch

        from rollmesh.generator.engines.torch.torch_engine import TorchEngine

    torch.set_num_threads(config.launcher.torch_threads)
    return TorchEngine(config.generator, config.model.dtype, AdapterSettings.from_config(config))


def _check_model(folder: Path) -> None:
    try:
        read_architecture(folder)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{error}; generator.engine=sglang serves other models") from error


TORCH = EngineDeclaration(build=_build, check_model=_check_model)
