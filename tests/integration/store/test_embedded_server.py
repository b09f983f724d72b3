"""The embedded server has its settings in a folder of any name, and none is left behind that did not start."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest
import redis

from rollmesh.config import RunConfig
from rollmesh.errors import StoreUnavailable
from rollmesh.launcher.redis import embedded_server, running_store
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.store import EmbeddedOptions, EmbeddedServer, embedded


def servers_in(folder: Path) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cwd", "status"]) if p.info["cwd"] == str(folder.resolve())]


@pytest.mark.parametrize("name", ["exp[lr=1e-4]", "a*b?", "[!a]", "{a,b}", 'two "words" \\', "-", "größe", "$HOME"])
def test_a_server_in_a_folder_of_any_name_has_its_password_its_log_and_no_port(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    server = EmbeddedServer(folder, EmbeddedOptions(password="a secret", maxmemory_bytes=1 << 26))
    assert server.start()
    try:
        with redis.Redis.from_url(server.url) as guest, pytest.raises(redis.AuthenticationError):
            guest.ping()
        with redis.Redis.from_url(server.url, password="a secret") as client:
            client.set("key", "value")
            assert client.config_get("maxmemory")["maxmemory"] == str(1 << 26)
        assert server.pid is not None
        assert not psutil.Process(server.pid).net_connections("inet")
        assert (folder / "redis.log").stat().st_size > 0
        assert (folder / "appendonlydir").is_dir()
        assert "a secret" not in "".join(p.read_text() for p in folder.iterdir() if p.is_file() and p.suffix != ".log")
    finally:
        server.stop()
    assert not servers_in(folder)


def test_a_server_that_does_not_answer_in_time_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_START_SECONDS", -1.0)
    server = EmbeddedServer(tmp_path / "redis", EmbeddedOptions(maxmemory_bytes=1 << 26))
    with pytest.raises(StoreUnavailable, match="has not answered"):
        server.start()
    assert not servers_in(server.folder)


async def test_a_server_whose_start_the_user_stops_is_ended(tmp_path: Path) -> None:
    run = RunConfig.model_validate(
        {"name": "stopped", "folder": str(tmp_path), "model": {"path": "models/tiny"}, "trainer": {"train_steps": 1}}
    )
    folder = RunFolder(tmp_path)
    server = embedded_server(run, folder)

    async def use() -> None:
        async with running_store(run, folder):
            await asyncio.Event().wait()

    using = asyncio.create_task(use())
    async with asyncio.timeout(120):
        while server.pid is None:
            await asyncio.sleep(0.001)
    using.cancel()
    with pytest.raises(asyncio.CancelledError):
        await using
    assert not servers_in(server.folder)
