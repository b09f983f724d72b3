"""Seconds of a simulated trainer: passes over tokens, publication, parts, shared devices, crashes."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from rollmesh.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerModel:
    """Durations of train steps, linear in tokens.

    A step takes the fixed seconds, the evidence passes (log-probabilities without a gradient) and the gradient of the
    batch. With ``colocated`` the trainer has the devices of the generators: they stop from the claim of a batch to the
    announcement of its policy, and the devices are switched twice.
    """

    fixed_seconds: float
    """Seconds of a step that no token adds to: batch file, optimizer, trainer state."""
    seconds_per_token: float
    """Forward, backward: seconds per token of the batch."""
    evidence_passes: int = 0
    """Passes that compute log-probabilities only: at the start of the step, with older weights, with the reference."""
    evidence_seconds_per_token: float = 0.0
    """Seconds per token of one such pass."""
    publication_seconds: float = 0.0
    """Seconds from new weights to the announcement of their policy."""
    background_seconds: float = 0.0
    """The last of ``publication_seconds``: the next step trains meanwhile, and is reported after the announcement."""
    colocated: bool = False
    switch_seconds: float = 0.0
    """Colocated only: seconds to hand the devices from generators to trainer, and again to hand them back."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if "seconds" not in field.name:
                continue
            if not 0 <= (value := getattr(self, field.name)) < math.inf:
                raise ConfigError(f"trainer.{field.name}={value}; expected finite seconds of at least 0")
        if self.evidence_passes < 0:
            raise ConfigError(f"trainer.evidence_passes={self.evidence_passes}; expected at least 0")
        if self.background_seconds > (0 if self.colocated else self.publication_seconds):
            raise ConfigError(
                f"trainer.background_seconds={self.background_seconds}: a publication takes "
                f"{self.publication_seconds}, none of it in the background of a colocated trainer; use less"
            )
        if self.switch_seconds and not self.colocated:
            raise ConfigError(
                f"trainer.switch_seconds={self.switch_seconds}: only a colocated trainer switches; set colocated or "
                "leave switch_seconds out"
            )

    def train_seconds(self, *, tokens: int, ahead_tokens: int = 0) -> float:
        """Return the seconds from the claim of a batch to new weights.

        ``ahead_tokens`` of the batch have their gradient and evidence already.
        """
        if not 0 <= ahead_tokens <= tokens:
            raise ValueError(f"ahead_tokens={ahead_tokens}; expected 0 to tokens={tokens}")
        return self.fixed_seconds + self.part_seconds(tokens - ahead_tokens) + self.switch_seconds

    def part_seconds(self, tokens: int) -> float:
        """Return the seconds of evidence and gradient of a part of a batch."""
        return tokens * (self.seconds_per_token + self.evidence_passes * self.evidence_seconds_per_token)

    def publish_seconds(self) -> float:
        """Return the seconds from new weights until generators may load their policy."""
        return self.publication_seconds + self.switch_seconds


class PartsAhead:
    """Gradients that a trainer computes for ready groups while it waits for the cut of their batch.

    One part after the other, in the order of ``add``. A cut waits for the part in progress.
    """

    def __init__(self, model: TrainerModel, now: float) -> None:
        """Raise ConfigError for a colocated trainer: while it waits, generators have the devices."""
        if model.colocated:
            raise ConfigError("parts ahead of a cut need a trainer with devices of its own; it is colocated")
        self._model = model
        self._free_at = now
        self._parts: list[tuple[float, int]] = []
        """(end, tokens) of each part, in order."""

    def add(self, now: float, tokens: int) -> float:
        """Queue a part whose groups are ready; return the time at which it is computed, unless the cut comes first."""
        self._free_at = max(self._free_at, now) + self._model.part_seconds(tokens)
        self._parts.append((self._free_at, tokens))
        return self._free_at

    def cut(self, now: float, *, tokens: int) -> float:
        """Return the time of the new weights of a batch that is cut now and contains all parts; begin the next batch.

        Parts that have not begun are computed with the rest of the batch.
        """
        begun = [part for part, start in zip(self._parts, self._starts(), strict=True) if start < now]
        began = max([now, *(end for end, _ in begun)])
        ahead = sum(size for _, size in begun)
        self._parts.clear()
        self._free_at = began + self._model.train_seconds(tokens=tokens, ahead_tokens=ahead)
        return self._free_at

    def _starts(self) -> list[float]:
        return [end - self._model.part_seconds(tokens) for end, tokens in self._parts]
