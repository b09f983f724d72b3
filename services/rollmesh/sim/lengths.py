"""Lengths of responses, forced by prompt and member: every schedule gets the same work.

A length is the quantile of a marginal distribution at a standard normal number z. Between the members of a prompt the
numbers have the correlation ``prompt_share``: z = sqrt(share) * z_prompt + sqrt(1 - share) * z_member. For a lognormal
marginal that is the usual split of the variance of ln(length) into a part between prompts and a part within them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import NormalDist

import numpy as np
from pydantic import Field, ValidationError

from rollmesh.config.section import Section, problems_of
from rollmesh.errors import ConfigError
from rollmesh.types import Float64Array, Int32Array


class Lognormal(Section):
    """Lognormal lengths: exp(ln(median) + sigma z)."""

    median: float = Field(gt=0)
    sigma: float = Field(ge=0)

    def at(self, z: Float64Array) -> Float64Array:
        """Return the quantiles."""
        return self.median * np.exp(self.sigma * z)


class Pareto(Section):
    """Pareto lengths: shortest * (1 - Phi(z))^(-1 / index)."""

    shortest: float = Field(gt=0)
    index: float = Field(gt=0)

    def at(self, z: Float64Array) -> Float64Array:
        """Return the quantiles."""
        # Phi(-z) keeps its precision in the tail, where 1 - Phi(z) has none.
        tail = np.array([0.5 * math.erfc(value / math.sqrt(2)) for value in z], dtype=np.float64)
        return self.shortest * np.maximum(tail, 1e-300) ** (-1 / self.index)


class _Normals:
    """Standard normal numbers of one seed. Generators of random numbers are costly to make, so there is one."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.Philox(key=seed)
        self._start = self._bits.state
        self._generator = np.random.Generator(self._bits)

    def draw(self, stream: int, index: int, count: int) -> Float64Array:
        """Return numbers that depend on (seed, stream, index) alone, float64 [count]."""
        self._start["state"]["counter"] = np.array([0, 0, stream, index], dtype=np.uint64)
        self._bits.state = self._start
        return self._generator.standard_normal(count)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthModel:
    """Lengths of all trajectories of a run, in tokens after the prompt."""

    marginal: "Marginal"
    prompt_share: float
    """Share of the variance of z that lies between prompts: 0.92 and 0.06 in two public traces."""
    cap: int
    """Most tokens; longer responses end there."""
    growth_per_step: float = 0.0
    """Relative growth of the lengths per batch of admitted prompts, so that every schedule sees the same growth."""
    seed: int = 0
    _normals: _Normals = field(init=False, repr=False, compare=False)
    _between: dict[int, Float64Array] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Normal number of each prompt drawn so far, float64 [1]."""

    def __post_init__(self) -> None:
        if not 0 <= self.prompt_share <= 1:
            raise ConfigError(f"lengths.prompt_share={self.prompt_share}: expected a number between 0 and 1")
        object.__setattr__(self, "_normals", _Normals(self.seed))

    def draw(self, position: int, prompt: int, members: int, *, step: float = 0.0) -> Int32Array:
        """Return the lengths of the first members of a group, int32 [members].

        ``position`` counts the groups of the run, ``prompt`` the row of the data, which comes again in every epoch.
        ``step`` is the batch to which the position belongs. A member has its length whatever the number of members.
        """
        if (between := self._between.get(prompt)) is None:
            between = self._between[prompt] = self._normals.draw(0, prompt, 1)
        within = self._normals.draw(1, position, members)
        z = math.sqrt(self.prompt_share) * between + math.sqrt(1 - self.prompt_share) * within
        lengths = self.marginal.at(z) * (1 + self.growth_per_step) ** step
        capped: Int32Array = np.minimum(np.maximum(np.rint(lengths), 1), self.cap).astype(np.int32)
        return capped

    def quantiles(self, probabilities: Sequence[float]) -> Float64Array:
        """Return the lengths at these probabilities."""
        z = np.array([NormalDist().inv_cdf(probability) for probability in probabilities])
        return np.minimum(self.marginal.at(z), self.cap)


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


Marginal = Lognormal | Pareto | QuantileLine
"""Distribution of the length of one trajectory before the cap; ``at`` has its quantiles at standard normal numbers."""


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


_MARGINALS: Mapping[str, type[Lognormal | Pareto]] = {"lognormal": Lognormal, "pareto": Pareto}


def parse_lengths(text: str) -> NamedLengths:
    """Read a name, ``NAME:cap=N``, ``lognormal:median=M,sigma=S,share=H`` or ``pareto:shortest=M,index=A,share=H``.

    ``NAME:cap=N`` scales the lengths of a name from the cap of its trace to another cap.

    Raises ConfigError for anything else.
    """
    if text in NAMED:
        return NAMED[text]
    kind, _, rest = text.partition(":")
    values = dict(item.partition("=")[::2] for item in filter(None, rest.split(",")))
    try:
        if kind in NAMED and values.keys() == {"cap"}:
            return _scaled(NAMED[kind], float(values["cap"]))
        if kind in _MARGINALS:
            share = float(values.pop("share", 0.5))
            return NamedLengths(marginal=_MARGINALS[kind].model_validate(values), prompt_share=share)
    except ValidationError as error:
        raise ConfigError(f"lengths={text}: {problems_of(error)}") from error
    except ValueError as error:
        raise ConfigError(f"lengths={text}: {error}") from error
    raise ConfigError(
        f"lengths={text}: no such run folder or trace, and none of {', '.join(NAMED)}, NAME:cap=N, "
        "lognormal:median=M,sigma=S,share=H or pareto:shortest=M,index=A,share=H"
    )


def _scaled(named: NamedLengths, cap: float) -> NamedLengths:
    """Return lengths that are to this cap as those of the source are to its own. Raises ValueError without a cap."""
    if not (cap >= 1 and isinstance(named.marginal, QuantileLine) and named.trace_cap):
        raise ValueError("expected at least 1 token, and a source with a known cap")
    factor = cap / named.trace_cap
    points = tuple((probability, tokens * factor) for probability, tokens in named.marginal.points)
    known_to = None if named.known_to is None else math.floor(named.known_to * factor)
    return replace(named, marginal=QuantileLine(points=points), known_to=known_to, trace_cap=math.floor(cap))
