"""Console notes about the addresses of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh.checkpoints.sealing import api_token
from rollmesh.config import RunConfig
from rollmesh.launcher.console_notes import AddressNotes
from rollmesh.launcher.supervisor import Supervisor
from rollmesh.runtime.endpoints import Endpoint, published_endpoint

URL = "http://127.0.0.1:1/"
OWN = "a-token-of-ours"


@pytest.mark.parametrize("own", [None, OWN], ids=["generated", "own"])
async def test_only_a_generated_token_is_in_the_link_of_the_page(tmp_path: Path, own: str | None) -> None:
    """A token of the operator's own may open more than this run, and consoles are kept in logs."""
    config = RunConfig.model_validate(
        {"name": "trial", "folder": str(tmp_path), "model": {"path": "model"}, "gateway": {"token": own}}
    )
    token = api_token(config)
    notes: list[str] = []
    with published_endpoint(tmp_path, Endpoint(service="gateway", index=0, grpc="", admin="", url=URL)):
        AddressNotes(config, tmp_path, Supervisor(0), notes.append).update()
    assert notes == [f"the run as a page: {URL}" + ("" if own else f"?token={token}")]
