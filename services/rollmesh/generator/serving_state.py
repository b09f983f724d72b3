"""Whether this generator takes calls, and who it is: shared by the service, the policy watcher and the registration."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rollmesh.errors import GenerationRefused


@dataclass(slots=True)
class ServingState:
    """State that decides on admission; changed in one asyncio loop."""

    address: str = ""
    """host:port of the gRPC server."""
    instance_id: str = field(default_factory=lambda: secrets.token_hex(16))
    """New at every start: addresses are reused, instances are not."""
    drained: asyncio.Event = field(default_factory=asyncio.Event)
    """The process ends, or was asked to drain: no new calls, for good."""
    reloading: bool = False
    """The running calls finish before the next policy is loaded: no new calls until then."""
    started: bool = False
    """The engine runs."""
    loading_version: int | None = None
    """Version that is being verified and loaded."""
    out_of_rotation: str = "no policy has been loaded yet"
    """Why the policy in the engine must not be served; empty when it may."""
    refused_version: int | None = None
    """Last version that was refused, until that one or a newer one is served."""
    refused_count: int = 0
    """Versions refused in a row, up to that one; 0 while that one is retried."""
    refused_reason: str = ""
    """Why it was refused."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set on every change: the registry should know at once."""
    _counted_version: int = -1
    _refused_in_a_row: int = 0
    _call_count: int = 0
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def draining(self) -> bool:
        """Whether no new call will ever be taken."""
        return self.drained.is_set()

    @property
    def reason(self) -> str:
        """Why no call is taken; empty while the generator serves."""
        if self.draining:
            return "draining"
        return self.out_of_rotation or ("waiting for running calls before a reload" if self.reloading else "")

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Take one call in for the length of the block; GenerationRefused unless calls are taken."""
        if self.reason:
            raise GenerationRefused(f"generator {self.instance_id} takes no calls: {self.reason}")
        self._call_count += 1
        try:
            yield
        finally:
            self._call_count -= 1
            if not self._call_count:
                self._idle.set()

    @contextmanager
    def loading(self, version: int) -> Iterator[None]:
        """A version is verified and loaded in this block: its checkpoint is in use."""
        self.loading_version = version
        self.changed.set()
        try:
            yield
        finally:
            self.loading_version = None
            self.changed.set()

    @property
    def call_count(self) -> int:
        """Calls admitted and not ended."""
        return self._call_count

    async def until_idle(self) -> None:
        """Wait until no admitted call is left."""
        while self._call_count:
            self._idle.clear()
            await self._idle.wait()

    def drain(self) -> None:
        """Take no more calls; the process then ends."""
        self.drained.set()
        self.changed.set()

    def set_reloading(self, reloading: bool) -> None:
        """Close or open the door around a draining reload."""
        self.reloading = reloading
        self.changed.set()

    def put_in(self) -> None:
        """A checked policy is in the engine."""
        self.started = True
        self.out_of_rotation = ""
        self.changed.set()

    def refuse(self, version: int, reason: str, *, retried: bool) -> None:
        """A version cannot be served. It counts once; not while it is retried, for its folder may only lag behind."""
        if not retried and version > self._counted_version:
            self._counted_version = version
            self._refused_in_a_row += 1
        self.refused_version, self.refused_reason = version, reason
        self.refused_count = 0 if retried else self._refused_in_a_row
        self.changed.set()

    def accept(self, version: int) -> None:
        """A version is served; refusals of older ones no longer matter."""
        if self.refused_version is not None and version >= self.refused_version:
            self.refused_version, self.refused_count, self.refused_reason = None, 0, ""
            self._refused_in_a_row = 0
            self.changed.set()

    def take_out(self, reason: str) -> None:
        """The engine runs, but must not be used."""
        self.started = True
        self.out_of_rotation = reason
        self.changed.set()
