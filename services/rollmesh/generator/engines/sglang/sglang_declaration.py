"""Declaration of the SGLang engine."""

from __future__ import annotations

import importlib.util
import os
import subprocess

from rollmesh.config import RunConfig
from rollmesh.errors import ConfigError
from rollmesh.generator.engines.engine_protocol import Engine, EngineDeclaration

_PROBE = "import importlib.util as u, sys; sys.exit(0 if u.find_spec('sglang') else 7)"
_PROBE_SECONDS = 60.0


def _check_machine(config: RunConfig) -> None:
    """Check that the configured Python, by default this one, can start SGLang; raises ConfigError otherwise."""
    section = config.generator.sglang
    if section.url is not None:
        return
    field = f"generator.sglang.python={section.python or 'this Python'}"
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


def _build(config: RunConfig, index: int) -> Engine:
    from rollmesh.generator.engines.sglang.sglang_engine import SglangEngine
    from rollmesh.generator.engines.sglang.sglang_options import SglangOptions

    return SglangEngine(SglangOptions.from_config(config, index))


SGLANG = EngineDeclaration(build=_build, check_machine=_check_machine)
