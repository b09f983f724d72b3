"""Lifetime counters of an engine; written by the model thread, read by anyone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """All values only grow; see ``protocol.EngineStatus`` for their meaning."""

    generated_tokens: int = 0
    prefill_tokens: int = 0
    reprefill_tokens: int = 0
    cached_tokens: int = 0
    decode_steps: int = 0
    preemptions: int = 0
    held_back: int = 0
    busy_seconds: float = 0.0
    running_slot_seconds: float = 0.0
