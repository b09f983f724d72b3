"""What the parts of the engine share: which weights are where, what holds decoding up, what has been counted."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field

from rollmesh.errors import EngineError, GenerationRefused
from rollmesh.generator.engines.engine_protocol import EngineLost
from rollmesh.generator.engines.sglang.folders import PolicyFolder
from rollmesh.generator.engines.sglang.slot_queue import SlotQueue


@dataclass(slots=True)
class EngineState:
    """One engine's state; changed in one asyncio loop."""

    seats: SlotQueue
    folder: PolicyFolder | None = None
    """The first policy: every later one has its architecture. None until the engine has started."""
    in_service: int = -1
    """Policy version whose tokens may be delivered."""
    on_trial: int | None = None
    """Version in the server that has not been put in service yet."""
    paused: bool = False
    loading: bool = False
    draining: bool = False
    """A load waits for the calls that have begun; no other call begins."""
    closed: bool = False
    failure: EngineLost | None = None
    load_count: int = 0
    cache_space: str = field(default_factory=lambda: secrets.token_hex(4))
    """Keeps this process's cache keys apart from those of an earlier one in front of the same server."""
    server_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by whoever pauses and continues the server."""
    generated_tokens: int = 0
    prefill_tokens: int = 0
    reprefill_tokens: int = 0
    cached_tokens: int = 0
    held_back: int = 0

    @property
    def cache_key(self) -> str:
        """The prefix cache that calls which begin now share: of these weights alone."""
        return f"{self.cache_space}-{self.load_count}"

    def serving(self) -> PolicyFolder:
        """The architecture; raises unless the engine serves."""
        if self.folder is None:
            raise EngineError("the engine has not been started")
        if self.closed:
            raise GenerationRefused("the engine has stopped")
        if self.failure is not None:
            raise self.failure
        return self.folder

    def lose(self, error: EngineLost) -> None:
        """The server is of no use any more: every call ends, and so does every later one."""
        if self.failure is None and not self.closed:
            self.failure = error
            for seat in self.seats:
                if seat.request is not None:
                    seat.request.cancel()
            self.seats.wake_all()
