"""The token that a run on one machine gets for its ports."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from rollmesh.config import RunConfig, load_run_config, write_run_config
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.launcher.service_specs import TOKEN_FILE, child_environment, with_mesh_token
from rollmesh.runtime.port_security import PortSecurity


def run(folder: Path, **sections: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"name": "trial", "folder": str(folder), "model": {"path": "models/tiny"}, **sections}
    )


def test_a_run_without_a_token_gets_one_that_only_its_owner_reads_and_its_services_accept(tmp_path: Path) -> None:
    folder = tmp_path / "a: folder #1 \U0001f600"
    config = with_mesh_token(run(folder), RunFolder(folder))
    file = folder / TOKEN_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    again = with_mesh_token(run(folder), RunFolder(folder))
    assert again == config
    write_run_config(run(folder), tmp_path / "config.yaml")
    service = load_run_config(tmp_path / "config.yaml", environ=child_environment(config, "unix:///redis.sock"))
    security = PortSecurity.from_config(service.security)
    assert security.sent_token == file.read_text().strip()
    assert security.tokens is not None
    assert security.tokens.refusal("Bearer guess")
    assert security.http_refusal("", verified_certificate=False) == ""


@pytest.mark.parametrize(
    "sections",
    [
        {"security": {"token": "its own"}},
        {"security": {"token_file": "tokens"}},
        {"security": {"tls": {"certificate": "c", "key": "k", "ca": "a"}}},
        {"launcher": {"host": "0.0.0.0"}},
    ],
)
def test_a_run_with_a_protection_of_its_own_or_with_other_machines_keeps_it(
    tmp_path: Path, sections: dict[str, Any]
) -> None:
    config = run(tmp_path, **sections)
    assert with_mesh_token(config, RunFolder(tmp_path)) == config
    assert not (tmp_path / TOKEN_FILE).exists()
