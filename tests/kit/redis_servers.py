"""Real Redis-compatible servers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollmesh.store import EmbeddedOptions, EmbeddedServer


@contextmanager
def running_server(folder: Path, *, maxmemory_bytes: int = 1 << 26, durable: bool = False) -> Iterator[EmbeddedServer]:
    """A server for the time of the block. A kill of a ``durable`` one loses nothing: with a flush a second it may lose
    answers given while the disk was slow."""
    options = EmbeddedOptions(maxmemory_bytes=maxmemory_bytes, appendfsync="always" if durable else "everysec")
    server = EmbeddedServer(folder, options)
    server.start()
    try:
        yield server
    finally:
        server.kill()
