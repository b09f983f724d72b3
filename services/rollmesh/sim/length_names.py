"""Length models by name, from published traces, and their description as text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist

import numpy as np

from rollmesh.errors import ConfigError
from rollmesh.sim.lengths import Lognormal, Marginal, Pareto
from rollmesh.types import Float64Array


@dataclass(frozen=True, kw_only=True)
class QuantileLine:
    """Lengths through published quantiles: ln(length) is linear in z between them, and beyond the outer ones."""

    points: tuple[tuple[float, float], ...]
    """(probability, tokens), ascending; two or more."""

    def at(self, z: Float64Array) -> Float64Array:
        """Return the quantiles."""
        known, logs, slopes = self._line
        segment = known[1:-1].searchsorted(z)
        lengths: Float64Array = np.exp(logs[segment] + slopes[segment] * (z - known[segment]))
        return lengths

    @cached_property
    def _line(self) -> tuple[Float64Array, Float64Array, Float64Array]:
        """Normal numbers and ln(length) of the points, and the slopes between them."""
        known = np.array([NormalDist().inv_cdf(probability) for probability, _ in self.points])
        logs = np.log([tokens for _, tokens in self.points])
        return known, logs, np.diff(logs) / np.diff(known)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedLengths:
    """A marginal with its share between prompts."""

    marginal: Marginal
    prompt_share: float
    known_to: int | None = None
    """Most tokens that the source knows, because its run ended longer responses there; None for no such end."""
    trace_cap: int | None = None
    """Largest allowed response of the source; None if unknown."""


NAMED: Mapping[str, NamedLengths] = {
    # rllm DeepCoder-14B: 80 groups of 8, 15% of the responses at the cap.
    "deepcoder-14b": NamedLengths(
        marginal=QuantileLine(points=((0.1, 2156), (0.5, 9964), (0.85, 16_000))),
        prompt_share=0.92,
        known_to=16_000,
        trace_cap=16_000,
    ),
    # verl DAPO with the base model Qwen2.5-32B: 576 groups of 8; the cap is that of DAPO's recipe.
    "dapo-32b": NamedLengths(
        marginal=QuantileLine(points=((0.1, 168), (0.5, 466), (0.9, 1039), (0.99, 2711))),
        prompt_share=0.06,
        trace_cap=20_480,
    ),
    # Quantiles of the mixture of four normal distributions that PolyTrace fitted to the math responses of Intern-S1, a
    # reasoning model. The share between prompts is that of the other reasoning model: the mixture has none.
    "intern-s1-math": NamedLengths(
        marginal=QuantileLine(
            points=(
                (0.05, 2233),
                (0.1, 3259),
                (0.25, 5169),
                (0.5, 8111),
                (0.75, 12_716),
                (0.9, 18_336),
                (0.95, 21_496),
                (0.99, 26_437),
                (0.999, 31_294),
            )
        ),
        prompt_share=0.92,
    ),
}
"""Length models through the quantiles of PolyTrace, a trace of public runs (arXiv 2509.25279)."""


def parse_lengths(text: str) -> NamedLengths:
    """Read a name, ``NAME:cap=N``, ``lognormal:median=M,sigma=S,share=H`` or ``pareto:shortest=M,index=A,share=H``.

    ``NAME:cap=N`` scales the lengths of a name from the cap of its trace to another cap.

    Raises ConfigError for anything else.
    """
    if text in NAMED:
        return NAMED[text]
    kind, _, rest = text.partition(":")
    values: dict[str, float] = {}
    for item in filter(None, rest.split(",")):
        name, _, number = item.partition("=")
        try:
            values[name] = float(number)
        except ValueError:
            raise ConfigError(f"lengths={text}: {item!r} is not NAME=NUMBER") from None
    if kind in NAMED and values.keys() == {"cap"}:
        return _scaled(kind, values["cap"])
    share = values.pop("share", 0.5)
    if kind == "lognormal" and values.keys() == {"median", "sigma"}:
        return NamedLengths(marginal=Lognormal(**values), prompt_share=share)
    if kind == "pareto" and values.keys() == {"shortest", "index"}:
        return NamedLengths(marginal=Pareto(**values), prompt_share=share)
    raise ConfigError(
        f"lengths={text}: no such run folder or trace, and none of {', '.join(NAMED)}, NAME:cap=N, "
        "lognormal:median=M,sigma=S,share=H or pareto:shortest=M,index=A,share=H"
    )


def _scaled(name: str, cap: float) -> NamedLengths:
    """Return lengths that are to this cap as those of the source are to its own."""
    named = NAMED[name]
    if not (cap >= 1 and isinstance(named.marginal, QuantileLine) and named.trace_cap):
        raise ConfigError(f"lengths={name}:cap={cap:g}: expected at least 1 token, and a source with a known cap")
    factor = cap / named.trace_cap
    points = tuple((probability, tokens * factor) for probability, tokens in named.marginal.points)
    known_to = None if named.known_to is None else math.floor(named.known_to * factor)
    return replace(named, marginal=QuantileLine(points=points), known_to=known_to, trace_cap=math.floor(cap))
