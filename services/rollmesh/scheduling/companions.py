"""Settings of other sections that go with a preset."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rollmesh.config.yaml_text import parse_yaml
from rollmesh.scheduling.presets import Preset


def companion_settings(preset: Preset) -> list[str]:
    """Return the settings that go with a preset, as ``a.b=c`` overrides of a run file."""
    return [f"{field}={json.dumps(value)}" for field, value in companion_fields(preset)]


def companion_fields(preset: Preset) -> Iterator[tuple[str, Any]]:
    """Yield the dotted fields of the run file that go with a preset, with their values."""
    return _leaves(parse_yaml(f"{{{preset.goes_with}}}"))


def _leaves(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
