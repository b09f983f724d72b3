"""Shared state of the engine: policy versions, reasons to hold decoding, and counters."""

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
    """State of one engine; changed in one asyncio loop."""

    queue: SlotQueue
    folder: PolicyFolder | None = None
    """The first policy; later policies have the same architecture. None until the engine has started."""
    in_service: int = -1
    """Policy version in service: its tokens may be delivered."""
    on_trial: int | None = None
    """Version in the server that is not in service yet."""
    paused: bool = False
    loading: bool = False
    draining: bool = False
    """True while a load waits for the calls that have started; other calls do not start."""
    closed: bool = False
    failure: EngineLost | None = None
    load_count: int = 0
    cache_space: str = field(default_factory=lambda: secrets.token_hex(4))
    """Prefix of this process's cache keys: an earlier process may have used the same server."""
    server_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock of the operations that pause and continue the server."""
    generated_tokens: int = 0
    prefill_tokens: int = 0
    reprefill_tokens: int = 0
    cached_tokens: int = 0
    held_back: int = 0
    preemptions: int = 0

    @property
    def cache_key(self) -> str:
        """Key of the prefix cache for calls that start now; it holds only keys and values of the current weights."""
        return f"{self.cache_space}-{self.load_count}"

    def serving(self) -> PolicyFolder:
        """Return the first policy's folder; raise unless the engine serves."""
        if self.folder is None:
            raise EngineError("the engine has not been started")
        if self.closed:
            raise GenerationRefused("the engine has stopped")
        if self.failure is not None:
            raise self.failure
        return self.folder

    def mark_lost(self, error: EngineLost) -> None:
        """Fail every running and later call, because the server is lost."""
        if self.failure is None and not self.closed:
            self.failure = error
            for server_call in self.queue:
                if server_call.request is not None:
                    server_call.request.cancel()
            self.queue.wake_all()
