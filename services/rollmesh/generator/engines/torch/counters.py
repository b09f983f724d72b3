"""Lifetime counters of an engine; written by the model thread, read by any thread."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Counters that never decrease; documented in ``engine_protocol.EngineStatus``."""

    generated_tokens: int = 0
    prefill_tokens: int = 0
    reprefill_tokens: int = 0
    cached_tokens: int = 0
    decode_steps: int = 0
    preemptions: int = 0
    held_back: int = 0
    busy_seconds: float = 0.0
    running_slot_seconds: float = 0.0
