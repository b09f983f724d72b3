"""Generation engines behind one protocol, by their names in ``generator.engine``; importing this loads none of them."""

import importlib.util
import os
import subprocess
from collections.abc import Mapping
from typing import Any

from rollmesh.config import RunConfig
from rollmesh.config.generator import SglangConfig
from rollmesh.errors import ConfigError, UnsupportedModel
from rollmesh.generator.engines.engine_protocol import Engine, EngineDeclaration
from rollmesh.generator.engines.policy_folders import AdapterSettings
from rollmesh.generator.engines.torch.architecture import architecture_from_config
from rollmesh.runtime.lifecycle import many_imports

_PROBE = "import importlib.util as u, sys; sys.exit(0 if u.find_spec('sglang') else 7)"
_PROBE_SECONDS = 60.0


def _build_torch(config: RunConfig, _index: int) -> Engine:
    with many_imports():
        import torch

        from rollmesh.generator.engines.torch.torch_engine import TorchEngine

    torch.set_num_threads(config.launcher.torch_threads)
    several_turns = config.rollout.program != "single_turn"
    adapter = AdapterSettings.from_config(config)
    return TorchEngine(config.generator, config.model.dtype, adapter, several_turns=several_turns)


def _check_torch_model(config: Mapping[str, Any]) -> None:
    try:
        architecture_from_config(config)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{error}; generator.engine=sglang serves other models") from error


def check_sglang(section: SglangConfig, place: str) -> None:
    """Check that the Python of the section at ``place``, by default this one, can start SGLang; ConfigError if not."""
    if section.url is not None:
        return
    field = f"{place}.python={section.python or 'this Python'}"
    missing = f"{field}: has no SGLang; install the extra rollmesh[sglang] there, or name an interpreter that has it"
    if section.python is None:
        if importlib.util.find_spec("sglang") is None:
            raise ConfigError(missing)
        return
    try:
        result = subprocess.run(
            [section.python, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=False,
            env={**os.environ, **section.environment},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{field}: cannot be run: {error}") from error
    if result.returncode:
        raise ConfigError(": ".join(filter(None, (missing, result.stderr.strip()))))


def _build_sglang(config: RunConfig, index: int) -> Engine:
    from rollmesh.generator.engines.sglang.sglang_engine import SglangEngine
    from rollmesh.generator.engines.sglang.sglang_options import SglangOptions

    return SglangEngine(SglangOptions.from_config(config, index))


ENGINES: Mapping[str, EngineDeclaration] = {
    "torch": EngineDeclaration(build=_build_torch, check_model=_check_torch_model),
    "sglang": EngineDeclaration(
        build=_build_sglang, check_machine=lambda config: check_sglang(config.generator.sglang, "generator.sglang")
    ),
}


def build_engine(config: RunConfig, index: int = 0) -> Engine:
    """Build the engine that the run file selects for generator number ``index``, not started."""
    return ENGINES[config.generator.engine].build(config, index)
