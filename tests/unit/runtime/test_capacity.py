"""Limits on the number of processes of a machine."""

from __future__ import annotations

from typing import Any

import pytest

from rollmesh.config.load import validate_run_config
from rollmesh.errors import ConfigError
from rollmesh.runtime.capacity import Machine, check_configured, refuse_overload

SMALL = Machine(cores=2, available_bytes=8 << 30)
WANTED = {"generator": 2, "reward": 1, "rollout": 1}


def test_more_processes_than_the_cores_can_take_are_refused() -> None:
    refuse_overload(SMALL, WANTED, "generator", 14, 100 << 20)
    with pytest.raises(ConfigError, match=r"generator=178: 180 .* are more than 16, 8 for each of the 2 cores"):
        refuse_overload(SMALL, WANTED, "generator", 178, 100 << 20)


def test_more_processes_than_the_memory_can_take_are_refused() -> None:
    refuse_overload(SMALL, WANTED, "generator", 5, 2 << 30)
    fewer = {**WANTED, "generator": 200}
    refuse_overload(Machine(cores=1, available_bytes=0), fewer, "generator", 100, 2 << 30)
    with pytest.raises(ConfigError, match=r"generator=6: 4 more processes of about 2048 MiB each do not fit into 6553"):
        refuse_overload(SMALL, WANTED, "generator", 6, 2 << 30)


def test_a_run_file_needs_cores_and_memory_for_its_processes() -> None:
    run: dict[str, Any] = {"name": "r", "folder": "r", "model": {"path": "recipe:countdown"}}
    run["generator"] = {"replicas": 6, "device": "cpu"}
    config = validate_run_config(run, "test")
    check_configured(config, Machine(cores=1, available_bytes=4 << 30))
    with pytest.raises(ConfigError, match=r"generator.replicas=6: .* starts 8 service processes, which need \d+ MiB;"):
        check_configured(config, Machine(cores=1, available_bytes=1 << 30))
    crowded = validate_run_config({**run, "generator": {"replicas": 7}}, "test")
    with pytest.raises(ConfigError, match=r"starts 9 service processes, more than 8, 8 for each of the 1 cores"):
        check_configured(crowded, Machine(cores=1, available_bytes=4 << 30))
