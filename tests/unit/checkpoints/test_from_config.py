"""The checkpoint store that a run file names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollmesh.checkpoints.location import open_checkpoints
from rollmesh.config import RunConfig
from rollmesh.errors import ConfigError


def run_in(folder: Path, **sections: Any) -> RunConfig:
    data = {"name": "pods", "folder": str(folder), "model": {"path": "recipe:countdown"}, **sections}
    return RunConfig.model_validate(data)


def test_services_without_a_shared_run_folder_are_told_what_they_must_share(tmp_path: Path) -> None:
    network = {"shared_folder": False}
    shared = str(tmp_path / "shared")

    with pytest.raises(ConfigError, match=r"checkpoints\.folder .*ROLLMESH_CHECKPOINTS__FOLDER"):
        open_checkpoints(run_in(tmp_path, network=network, checkpoints={"secret": "s" * 32}))
    with pytest.raises(ConfigError, match=r"checkpoints\.secret .*ROLLMESH_CHECKPOINTS__SECRET"):
        open_checkpoints(run_in(tmp_path, network=network, checkpoints={"folder": shared}))
    assert not (tmp_path / "secret").exists()

    sections = {"network": network, "checkpoints": {"folder": shared, "secret": "s" * 32}}
    assert str(open_checkpoints(run_in(tmp_path, **sections)).root) == shared


def test_a_folder_that_nobody_can_create_is_a_wrong_setting_and_no_crash_to_retry(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="/proc/rollmesh/checkpoints"):
        open_checkpoints(run_in(tmp_path, checkpoints={"folder": "/proc/rollmesh/checkpoints"}))


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"folder": "ftp://host/x"}, "checkpoints.folder=ftp://host/x: expected a folder, or one of s3://, gs://"),
        ({"object_store": {"endpoint_url": "http://a"}}, "checkpoints.object_store is for object stores only"),
        ({"folder": "s3://b", "object_store": {"secret": "x"}}, "credentials do not belong in a run file"),
    ],
)
def test_a_location_that_cannot_be_is_refused_with_the_reason(
    tmp_path: Path, section: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        run_in(tmp_path, checkpoints=section)
