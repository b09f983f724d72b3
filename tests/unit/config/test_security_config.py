"""The sections that say who may talk to whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rollmesh.config import load_run_config, write_run_config
from rollmesh.errors import ConfigError

FILES = {"certificate": "tls.crt", "key": "tls.key", "ca": "ca.crt"}


@pytest.fixture
def run_file(tmp_path: Path):
    def write(**sections: Any) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump({"name": "run", "folder": "out", "model": {"path": "m"}, **sections}))
        return path

    return write


def test_ports_are_open_unless_the_run_file_says_otherwise(run_file) -> None:
    config = load_run_config(run_file(), environ={})
    assert not config.security.tls.enabled
    assert config.security.token is None
    assert not config.store.tls.configured


def test_all_three_files_turn_mutual_tls_on(run_file) -> None:
    assert load_run_config(run_file(security={"tls": FILES}), environ={}).security.tls.enabled


@pytest.mark.parametrize("missing", sorted(FILES))
def test_a_missing_file_of_the_three_is_named(run_file, missing: str) -> None:
    files = {name: path for name, path in FILES.items() if name != missing}
    with pytest.raises(ConfigError, match=f"certificate, key and ca together; missing: {missing}"):
        load_run_config(run_file(security={"tls": files}), environ={})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"security": {"token": "a", "token_file": "b"}}, "set only one of them"),
        ({"security": {"token": "  "}}, "security.token is empty"),
        ({"store": {"url": "redis://host", "tls": {"ca": "ca.crt"}}}, "store.tls is for rediss://"),
        ({"store": {"tls": {"ca": "ca.crt"}}}, "store.tls is for rediss://"),
        ({"store": {"url": "rediss://host", "tls": {"key": "k"}}}, "store.tls.key must be set together"),
        ({"store": {"url": "rediss://host", "tls": {"check_hostname": False}}}, "any server is accepted"),
        ({"telemetry": {"trace_ratio": 1.5}}, "telemetry.trace_ratio"),
    ],
)
def test_combinations_that_cannot_be_meant_are_refused(run_file, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run_config(run_file(**sections), environ={})


def test_tokens_and_passwords_are_never_written_or_shown(run_file, tmp_path: Path) -> None:
    environ = {"ROLLMESH_SECURITY__TOKEN": "0123", "ROLLMESH_STORE__SENTINEL_PASSWORD": "[hunter2"}
    file = run_file(store={"url": "rediss+sentinel://host/queue", "tls": {"ca": "ca.crt"}})
    config = load_run_config(file, environ=environ)
    assert config.security.token is not None
    assert config.security.token.get_secret_value() == "0123"
    written = tmp_path / "config.yaml"
    write_run_config(config, written)
    assert "0123" not in written.read_text()
    assert "hunter2" not in written.read_text()
    assert load_run_config(written, environ=environ) == config
    assert "0123" not in repr(config)
    with pytest.raises(ConfigError, match="token") as error:
        load_run_config(run_file(security={"token": 424242}), environ={})
    assert "424242" not in str(error.value)
