"""The engine protocol: the interface between the generator service and any engine, and its declaration."""

from bisect import bisect_left
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, Self

from rollmesh.config import RunConfig
from rollmesh.errors import EngineError
from rollmesh.types import Chunk, Float32Array, GenerationCall, Int32Array


class OnNewVersion(StrEnum):
    """Treatment of running calls when a new policy version is loaded."""

    INTERRUPT = "interrupt"
    """Running calls end as ``interrupted`` with the tokens they have; their KV is dropped."""
    KEEP_KV = "keep_kv"
    """Weights are swapped under running calls; chunks split at the swap and carry the older kv_min_version. A call with
    tokens of a newer version than the new one ends as ``interrupted``: the versions of one call never decrease. A call
    without a token does not keep its cache (torch)."""
    DRAIN = "drain"
    """New calls wait; weights are swapped once the running calls have finished."""
    NEXT_SLICE = "next_slice"
    """Adapters only: running calls (torch) or slices of calls (SGLang) finish on the version they began with, later
    ones use the new version. Nothing pauses, and no cache is shared between versions."""


class EngineLost(EngineError):
    """Loss of the engine's backend, or an unknown backend state: this process must exit and restart."""


@dataclass(slots=True, kw_only=True)
class EngineCounters:
    """Lifetime counters of an engine, which never decrease; any thread may read them."""

    generated_token_total: int = 0
    prefill_token_total: int = 0
    reprefill_token_total: int = 0
    """Prefilled tokens that this or another generator already sampled (resumed contexts)."""
    cached_token_total: int = 0
    busy_seconds_total: float = 0.0
    """Seconds spent in prefill and decode."""
    running_slot_seconds_total: float = 0.0
    """Integral of running calls over time: numerator of the bubble ratio."""
    preemption_total: int = 0
    """Calls that lost their cache because it was full; a pause or a load is none."""
    held_back_total: int = 0
    """Times a call was held because its caller was late to save the tokens."""


RUNNING_BOUNDS = (1, 2, 4, 8, 16, 32, 64)
"""Largest numbers of running calls of the classes in ``SpeculationCounters``; a last class has all above."""
RUNNING_CLASSES = tuple(
    str(high) if high == low else f"{low}-{high}"
    for low, high in zip((1, *(bound + 1 for bound in RUNNING_BOUNDS)), (*RUNNING_BOUNDS, "more"), strict=True)
)
"""Names of these classes: 1, 2, 3-4, ..., 65-more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationCounters:
    """Lifetime counters of speculative decoding, and the memory of its drafts now."""

    drafted_token_total: int = 0
    """Draft tokens that a wide step has verified."""
    accepted_token_total: int = 0
    """Draft tokens that were sampled, too; each saves its call one decode step."""
    draft_bytes: int = 0
    row_steps: tuple[int, ...] = (0,) * (len(RUNNING_BOUNDS) + 1)
    """Sum of the calls over all decode steps, by class of running calls."""
    row_tokens: tuple[int, ...] = (0,) * (len(RUNNING_BOUNDS) + 1)
    """Tokens that these steps sampled: over ``row_steps``, the tokens of a call a step."""

    @property
    def wasted_token_total(self) -> int:
        """Draft tokens that were verified in vain."""
        return self.drafted_token_total - self.accepted_token_total

    def by_name(self) -> dict[str, int]:
        """Return the counters that only increase, as ``types.GeneratorWork`` has them."""
        classes = zip(RUNNING_CLASSES, self.row_steps, self.row_tokens, strict=True)
        return {"drafted": self.drafted_token_total, "accepted": self.accepted_token_total} | {
            f"{name} {running}": value
            for running, steps, tokens in classes
            for name, value in (("steps", steps), ("tokens", tokens))
            if steps
        }

    def with_steps(self, running: int, steps: int, drafted: int, accepted: int) -> Self:
        """Add steps of one call that verified drafts while so many calls ran; each step samples one token more."""
        place = bisect_left(RUNNING_BOUNDS, running)
        row_steps, row_tokens = list(self.row_steps), list(self.row_tokens)
        row_steps[place] += steps
        row_tokens[place] += steps + accepted
        return replace(
            self,
            drafted_token_total=self.drafted_token_total + drafted,
            accepted_token_total=self.accepted_token_total + accepted,
            row_steps=tuple(row_steps),
            row_tokens=tuple(row_tokens),
        )


@dataclass(slots=True, kw_only=True)
class EngineStatus(EngineCounters):
    """Load and counters of an engine; the defaults are those before it starts."""

    policy_version: int = -1
    running_count: int = 0
    waiting_count: int = 0
    slot_count: int = 0
    kv_tokens_used: int = 0
    kv_token_capacity: int = 0
    paused: bool = False
    decode_step_total: int | None = 0
    """Decode steps; None if the engine cannot count them."""
    decode_seconds_total: float | None = 0.0
    """Seconds of the decode steps, without prefills; None if the engine cannot count them."""
    speculation: SpeculationCounters | None = None
    """None while ``generator.speculation`` is off."""


class Engine(Protocol):
    """A generation engine; every method is safe to call from one asyncio loop.

    A new trajectory never uses KV of another policy version. Errors are EngineError (the engine has failed),
    GenerationRefused (this engine cannot serve the call) or DataError (the call is invalid; the error names the field).
    """

    async def start(self, folder: Path, policy_version: int) -> None:
        """Load the first policy from a verified Hugging Face folder and start to serve."""

    def generate(self, call: GenerationCall) -> AsyncGenerator[Chunk, None]:
        """Stream the chunks of one call; closing the stream early releases the slot.

        The versions of a chunk without tokens mean nothing: ``with_empty_chunks`` sets them.
        """

    async def interrupt(self, trajectory_ids: Sequence[str] | None = None) -> int:
        """End these calls (None: all) as ``interrupted``; returns the number of calls ended."""

    def acknowledge(self, context_token_counts: Mapping[str, int]) -> None:
        """Record the durable tokens of each trajectory, prompt included.

        A call with an ``unacknowledged_token_limit`` is held before a chunk that might exceed it: it keeps its slot and
        cache, and other calls continue. It continues once enough tokens are acknowledged. It ends as ``interrupted``
        after ``backlog.hold_seconds``, and immediately if a running call needs its cache.
        """

    async def stage(self, folder: Path, policy_version: int) -> bool:
        """Read the weights in ``folder`` while calls run, so that ``load`` only swaps them.

        Returns True if ``score`` can now name the version, while calls still use the old one; always for an adapter,
        which is loaded beside those in use. Raises EngineError if the weights do not fit.
        """

    async def load(self, folder: Path, policy_version: int, mode: OnNewVersion) -> float:
        """Swap to the policy in ``folder``; returns the seconds during which decoding stopped.

        Raises EngineError if the weights do not fit the running architecture; the old ones keep serving.
        """

    async def score(self, sequences: Sequence[Int32Array], policy_version: int | None = None) -> list[Float32Array]:
        """Compute the log-probability (T=1) of each token after the first, [tokens - 1] per sequence.

        The canary and the audit use it. ``policy_version`` names an adapter that is loaded, or weights that are staged
        if ``stage`` has returned True; None is the policy that calls use.
        """

    async def pause(self) -> None:
        """Stop decoding; running calls are held and ``status`` still answers."""

    async def resume(self) -> None:
        """Continue decoding."""

    async def respond(self) -> None:
        """Return once the engine is known to run, which includes calls that are held; a hung engine does not return.

        Raises EngineError if the engine has failed.
        """

    def status(self) -> EngineStatus:
        """Return load and counters without waiting for a decode step; EngineError if the engine has failed."""

    async def aclose(self) -> None:
        """End running calls as ``interrupted`` and stop the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDeclaration:
    """Registry entry of an engine; its module imports the engine and its libraries only inside ``build``.

    The engine's section of the run file declares its fields, secrets, defaults and rules (``config.section``).
    """

    build: Callable[[RunConfig, int], Engine]
    """Build the engine of the run's generator with this index, not started."""
    check_machine: Callable[[RunConfig], None] = lambda _: None
    """Raise ConfigError unless a generator of the run can start on this machine."""
    check_model: Callable[[Mapping[str, Any]], None] = lambda _: None
    """Raise EngineError unless the engine serves the model of this config.json."""
