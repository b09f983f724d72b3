"""The run file: one YAML per run, validated by pydantic and read only by ``load_run_config``."""

from rollmesh.config.load import load_run_config, write_run_config
from rollmesh.config.run import RunConfig

__all__ = ["RunConfig", "load_run_config", "write_run_config"]
