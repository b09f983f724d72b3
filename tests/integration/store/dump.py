"""Every key of a run as plain values: what a call that is refused must leave exactly as it was."""

from __future__ import annotations

from rollmesh.store import TrajectoryStore

_READ = {
    b"string": ("GET",),
    b"hash": ("HGETALL",),
    b"list": ("LRANGE", 0, -1),
    b"set": ("SMEMBERS",),
    b"zset": ("ZRANGE", 0, -1, "WITHSCORES"),
    b"stream": ("XRANGE", "-", "+"),
}


async def dump(store: TrajectoryStore) -> dict[str, tuple[object, bool]]:
    """Value by key, and whether the key will go away by itself."""
    command, found = store.connection.command, {}
    for key in sorted(await command("KEYS", store.connection.keys.prefix + "*")):
        verb, *arguments = _READ[await command("TYPE", key)]
        value = await command(verb, key, *arguments)
        # The server may list these in another order the next time.
        plain = sorted(value) if isinstance(value, set) or verb == "SMEMBERS" else value
        found[key.decode()] = (plain, await command("PTTL", key) != -1)
    return found


def changed(before: dict[str, tuple[object, bool]], after: dict[str, tuple[object, bool]]) -> list[str]:
    """Keys that are not what they were."""
    return sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))


async def copy_of_keys(store: TrajectoryStore) -> dict[bytes, bytes]:
    """Every key of a run as the server would write it down."""
    command = store.connection.command
    keys = await command("KEYS", store.connection.keys.prefix + "*")
    return dict(zip(keys, await store.connection.commands([("DUMP", key) for key in keys]), strict=True))


async def put_back(store: TrajectoryStore, copy: dict[bytes, bytes]) -> None:
    """Make a run what it was when it was copied."""
    keys = await store.connection.command("KEYS", store.connection.keys.prefix + "*")
    await store.connection.commands([("DEL", key) for key in keys])
    await store.connection.commands([("RESTORE", key, 0, value) for key, value in copy.items()])
