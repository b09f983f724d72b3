"""The run file: one YAML per run, validated by pydantic and read only by ``load_run_config``.

Every command and service loads it first. It checks types, ranges and combinations of fields, and names field, value and
remedy of an error. It must not import a service or open a connection.
"""

from rollmesh.config.load import load_run_config, text_override, write_run_config
from rollmesh.config.run import RunConfig

__all__ = ["RunConfig", "load_run_config", "text_override", "write_run_config"]
