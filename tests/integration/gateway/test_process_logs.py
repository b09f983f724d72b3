"""The list of processes is open as all reads are; logs need the token, and no other file is read."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from .gateway_scene import Scene


@pytest.fixture
def logs(scene: Scene) -> Path:
    folder = Path(scene.config.folder) / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trainer-0.log").write_text("first\nsecond\nthird\n")
    (folder.parent / "secret-0.log").write_text("hidden\n")
    return folder


async def test_a_log_needs_the_token_and_the_list_does_not(client: httpx.AsyncClient, logs: Path) -> None:
    token = client.headers.pop("Authorization")
    listed = (await client.get("api/v1/processes")).json()["processes"]
    assert [(one["name"], one["pid"], one["log_bytes"]) for one in listed] == [("trainer-0", None, 19)]
    assert (await client.get("api/v1/logs/trainer-0")).status_code == 401
    headers = {"Authorization": token}
    answer = await client.get("api/v1/logs/trainer-0", params={"lines": 2}, headers=headers)
    assert answer.json() == {"name": "trainer-0", "lines": ["second", "third"]}


@pytest.mark.parametrize("name", ["trainer-1", "..%2fsecret-0", "trainer-0.log", "secret-0"])
async def test_no_other_file_is_read(client: httpx.AsyncClient, logs: Path, name: str) -> None:
    answer = await client.get(f"api/v1/logs/{name}")
    assert answer.status_code in (400, 404)
    assert "hidden" not in answer.text
