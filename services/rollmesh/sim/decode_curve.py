"""Cost of a generator's decode steps: tables by running calls, and the measured curve that they come from.

A decode step of ``r`` running calls that hold ``C`` context tokens together takes base(r) + slope(r) * C seconds. A
measured curve has points (running calls, context tokens per call, seconds) at two contexts or more, because one context
cannot tell base from slope. ``make bench NAME=engine ARGS=--save`` and ``make bench NAME=gpu`` write such a file.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np
from pydantic import Field, ValidationError, model_validator

from rollmesh.config.section import Section, problems_of
from rollmesh.errors import ConfigError
from rollmesh.file_writes import write_text

_MEASURE = 'make bench NAME=engine ARGS="--save FILE"'
_NOISE = 0.1
"""Largest relative fall between neighbouring points that counts as noise of the measurement."""
_MOST_CONTEXT_SHARE = 0.99
"""Largest share of a step that a fit may charge to the context: noise must not make the base 0 or negative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCosts:
    """Seconds of decode steps and prefills of one generator."""

    base: tuple[float, ...]
    """Seconds of a step without its context, by running calls; index 0 is not used."""
    slope: tuple[float, ...]
    """Seconds of a step per context token of all running calls together, by running calls."""
    prefill_seconds_per_token: float

    @property
    def slots(self) -> int:
        """Largest number of running calls with known costs."""
        return len(self.base) - 1

    def step(self, running: int, context: float) -> float:
        """Return the seconds of one decode step with ``context`` tokens in all running calls together."""
        return self.base[running] + self.slope[running] * context

    def wide(self, tokens: float) -> float:
        """Return the seconds of a step of so many tokens without its context; those beyond the table are prefilled."""
        low = min(int(tokens), self.slots - 1)
        share = min(tokens - low, 1.0)
        beyond = max(0.0, tokens - self.slots) * self.prefill_seconds_per_token
        return (1 - share) * self.base[low] + share * self.base[low + 1] + beyond


class CurvePoint(Section):
    """Measured decode step."""

    running: int = Field(ge=1)
    context: int = Field(ge=1)
    """Context tokens of each running call."""
    seconds: float = Field(gt=0)


class DecodeCurve(Section):
    """Measured decode steps of one engine, model and device. Raises ValidationError for a curve that is not usable."""

    engine: str = ""
    """What was measured, for people."""
    prefill_seconds_per_token: float = Field(ge=0)
    points: tuple[CurvePoint, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _is_usable(self) -> Self:
        for running, row in self._rows().items():
            if len(row) < 2:
                raise ValueError(
                    f"running={running} was measured at one context ({min(row)} tokens per call); measure at two "
                    "contexts or more: one cannot tell the cost of the context from the rest"
                )
            _require_no_fall(f"running={running}, context", row)
        for context in {point.context for point in self.points}:
            column = {p.running: p.seconds for p in self.points if p.context == context}
            _require_no_fall(f"context={context}, running", column)
        return self

    def costs(self, slots: int) -> EngineCosts:
        """Return tables up to ``slots`` running calls; ConfigError beyond the largest measured number.

        base and slope are fitted at each measured number of running calls (least squares over the contexts, none
        below 0) and interpolated linearly between; below the smallest number its values hold.
        """
        rows = self._rows()
        measured = sorted(rows)
        if slots > measured[-1]:
            raise ConfigError(
                f"decode curve: slots={slots}, but the curve ends at running={measured[-1]}; measure up to the slots "
                "of the generators, or simulate fewer slots"
            )
        fits = [_fit(running, rows[running]) for running in measured]
        every = np.arange(slots + 1)
        base, slope = (np.interp(every, measured, [fit[part] for fit in fits]) for part in (0, 1))
        return EngineCosts(
            base=tuple(base.tolist()),
            slope=tuple(slope.tolist()),
            prefill_seconds_per_token=self.prefill_seconds_per_token,
        )

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a saved curve. Raises ConfigError if the file is missing, is no curve, or has unusable points."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise ConfigError(
                f"{path}: no decode curve as make bench NAME=engine writes it: {problems_of(error)}"
            ) from error
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; measure with: {_MEASURE}") from error

    def _rows(self) -> dict[int, dict[int, float]]:
        rows: dict[int, dict[int, float]] = {}
        for point in self.points:
            rows.setdefault(point.running, {})[point.context] = point.seconds
        return rows


def _fit(running: int, row: Mapping[int, float]) -> tuple[float, float]:
    """Return base (above 0) and slope (at least 0) of seconds = base + slope * running * context."""
    tokens = running * np.array(list(row), dtype=float)
    seconds = np.array(list(row.values()))
    steepest = _MOST_CONTEXT_SHARE * float(np.min(seconds / tokens))
    slope = min(max(0.0, float(np.polyfit(tokens, seconds, 1)[0])), steepest)
    return float(np.mean(seconds - slope * tokens)), slope


def _require_no_fall(name: str, seconds: Mapping[int, float]) -> None:
    for (small, before), (large, after) in pairwise(sorted(seconds.items())):
        if after < before * (1 - _NOISE):
            raise ValueError(
                f"{name}={large} takes {after:g} s, less than {before:g} s at {small}; steps do not "
                "become faster with more work: measure again on an idle machine"
            )


def write_curve(path: Path, points: Iterable[CurvePoint], prefill_seconds_per_token: float, engine: str) -> None:
    """Write measured points as JSON, for ``DecodeCurve.read``, which checks them together."""
    curve = DecodeCurve.model_construct(
        engine=engine, prefill_seconds_per_token=prefill_seconds_per_token, points=tuple(points)
    )
    write_text(path, curve.model_dump_json(indent=1) + "\n")
