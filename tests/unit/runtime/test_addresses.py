"""Addresses that a service binds to and advertises."""

from __future__ import annotations

from typing import Any

import pytest

from rollmesh.config import RunConfig
from rollmesh.errors import ConfigError
from rollmesh.runtime.addresses import advertised, bind_host, instance_name
from rollmesh.runtime.health import Health
from rollmesh.runtime.metrics import Metrics
from rollmesh.runtime.service_host import admin_server


def run_with(**network: Any) -> RunConfig:
    data = {"name": "pods", "folder": "runs/pods", "model": {"path": "recipe:countdown"}, "network": network}
    return RunConfig.model_validate(data)


def test_a_run_on_one_machine_binds_to_the_launchers_host() -> None:
    config = run_with()

    assert bind_host(config) == "127.0.0.1"
    assert advertised(config, 7) == "127.0.0.1:7"
    assert instance_name(config, "rollout", 3) == "rollout-3"


def test_a_pod_binds_to_everything_and_tells_its_own_address_and_name() -> None:
    config = run_with(host="0.0.0.0", advertise_host="10.1.2.3", instance="mesh-rollout-5c9d-xk2lp")

    assert bind_host(config) == "0.0.0.0"
    assert advertised(config, 7070) == "10.1.2.3:7070"
    assert instance_name(config, "rollout", 0) == "mesh-rollout-5c9d-xk2lp"


def test_an_ipv6_address_is_told_in_brackets() -> None:
    assert advertised(run_with(host="::", advertise_host="fd00::5"), 7070) == "[fd00::5]:7070"


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_wildcard_is_never_told_to_others(host: str) -> None:
    with pytest.raises(ConfigError, match=r"ROLLMESH_NETWORK__ADVERTISE_HOST"):
        advertised(run_with(host=host), 7070)


async def test_the_admin_port_can_be_chosen_and_a_taken_one_is_a_clear_error() -> None:
    async with admin_server(Metrics("rollout"), Health(), "127.0.0.1") as port:
        with pytest.raises(ConfigError, match=rf"network\.admin_port={port}"):
            async with admin_server(Metrics("rollout"), Health(), "127.0.0.1", port):
                pass
