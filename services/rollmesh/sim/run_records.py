"""Records of a real run that a simulation is calibrated on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rollmesh.sim.core_shares import Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedWork:
    """Work of one generator in an interval."""

    steps: float
    """Decode steps."""
    tokens: float
    """Sampled tokens: the sum of the running calls over the steps."""
    prefill_tokens: float
    busy_seconds: float
    """Seconds in prefill and decode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedUpdate:
    """Times of one train step, Unix seconds."""

    tokens: int
    """Response tokens of the batch."""
    forward_tokens: int
    """Tokens of its prompts and responses."""
    cut_at: float
    gradient_seconds: float
    trained_at: float
    copied_at: float
    """Time at which the trainer went on, with the weights copied out."""
    announced_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorUse:
    """Processor seconds of a run, from its first to its last recorded train step."""

    generators: float
    services: float
    """All other services together without the trainer, the queue's server included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecords:
    """One run: all its recorded train steps, and its work from the end of the first one on."""

    folder: Path
    """Run folder, with the lengths."""
    updates: tuple[TrainedUpdate, ...]
    """Train steps in their order, two or more."""
    work: tuple[RecordedWork, ...]
    generators: int
    use: ProcessorUse
    reward_seconds: float
    """Mean time from the last token of an answer to its reward."""
    fetch_seconds: float
    """Mean time of a load during which the old policy serves."""
    swap_seconds: float
    """Mean pause of a load."""
    strangers: Samples
    """Runnable processes of the machine that are not of the run, twice a second."""

    @property
    def updates_per_second(self) -> float:
        """Rate from the end of the first train step to the end of the last one."""
        return (len(self.updates) - 1) / (self.updates[-1].trained_at - self.updates[0].trained_at)
