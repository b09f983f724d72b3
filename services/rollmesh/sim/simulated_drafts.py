"""Speculative decoding of simulated generators: drafts by class of length, and what a token then costs.

A draft token is accepted with probability a if all before it are: geometric by position, so k draft tokens bring
a + a^2 + ... + a^k tokens a step. The class of a call, a third of the responses each, has its own a and k. When r calls
run, they are the r longest of those that fill the slots, as in the tail of a batch.

A step of r calls is then one of more tokens, computed at the cost of a step of so many calls, and brings g tokens a
call. All calls advance at this mean: base(r) and slope(r) of a token are those of the wide step over g.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise

from rollmesh.errors import ConfigError
from rollmesh.sim.decode_curve import EngineCosts

CLASSES = ("long", "medium", "short")
_LENGTHS = (2, 4, 8, 16)
"""Draft lengths of RhymeRL: doubled when all is accepted, halved on a miss."""
LONGEST_DRAFT = _LENGTHS[-1]
_SEARCH_STEPS = 100


class DraftRule(StrEnum):
    """Rule for the lengths of drafts."""

    HISTORY = "history"
    """The torch engine's: RhymeRL's lengths, none for the short class, none where a wide step costs more than it
    brings."""
    RHYME = "rhyme"
    """RhymeRL: 2 tokens, doubled up to 16, halved on a miss; for every call at all times."""
    DAS = "das"
    """DAS: the budget that minimises the makespan, none for the short class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedDrafts:
    """Drafts of a simulated engine."""

    rule: DraftRule
    acceptance: tuple[float, ...]
    """Chance that a draft token is accepted if those before it are, by class."""

    @classmethod
    def parse(cls, text: str) -> "SimulatedDrafts":
        """Read ``RULE:acceptance=A`` or ``RULE:long=A,medium=A,short=A``. Raises ConfigError for anything else."""
        name, _, rest = text.partition(":")
        pairs = [item.partition("=")[::2] for item in rest.split(",")]
        values = dict.fromkeys(CLASSES, pairs[0][1]) if pairs[0][0] == "acceptance" else dict(pairs)
        try:
            acceptance = tuple(float(values.pop(kind)) for kind in CLASSES)
            if values or not all(0 <= chance < 1 for chance in acceptance):
                raise ValueError("out of bounds")
            return cls(rule=DraftRule(name), acceptance=acceptance)
        except (KeyError, ValueError):
            raise ConfigError(
                f"drafts={text}: expected RULE:acceptance=A or RULE:long=A,medium=A,short=A with a rule of "
                f"{', '.join(DraftRule)} and 0 <= A < 1"
            ) from None

    def costs(self, plain: EngineCosts, slots: int, lengths: Sequence[float]) -> EngineCosts:
        """Return the costs of a token by running calls, up to ``slots``; ``lengths`` are those of the classes."""
        steps = self._steps(plain, slots, lengths)
        slopes = zip(plain.slope, steps, strict=False)
        return replace(
            plain,
            base=tuple(seconds / gain for gain, seconds in steps),
            slope=tuple(slope / gain for slope, (gain, _) in slopes),
        )

    def tokens_per_step(self, plain: EngineCosts, slots: int, lengths: Sequence[float]) -> dict[int, float]:
        """Return the tokens of a call a step by running calls: 1, 2, 4 and so on, and all slots."""
        steps = self._steps(plain, slots, lengths)
        powers = {2**power for power in range(slots.bit_length()) if 2**power <= slots}
        return {running: steps[running][0] for running in sorted({slots, *powers})}

    def _steps(self, plain: EngineCosts, slots: int, lengths: Sequence[float]) -> list[tuple[float, float]]:
        """Return the tokens of a call and the seconds without context of a step, by running calls."""
        work = self._work(plain, slots, lengths)
        steps = [(1.0, plain.base[0])]
        for running in range(1, slots + 1):
            drafted, brought = (
                sum(calls * each[place] for calls, each in zip(_longest(running, slots), work, strict=True))
                for place in (0, 1)
            )
            gain, seconds = 1 + brought / running, plain.wide(running + drafted)
            pays = self.rule is not DraftRule.HISTORY or seconds < gain * plain.base[running]
            steps.append((gain, seconds) if pays else (1.0, plain.base[running]))
        return steps

    def _work(self, plain: EngineCosts, slots: int, lengths: Sequence[float]) -> list[tuple[float, float]]:
        """Return the drafted and the accepted tokens of a step, by class."""
        if self.rule is DraftRule.DAS:
            passes, budgets = das_budget(
                lengths[:-1],
                self.acceptance[:-1],
                pass_seconds=plain.base[1],
                token_seconds=plain.prefill_seconds_per_token * slots / len(CLASSES),
            )
            drafted = [*(budget / passes for budget in budgets), 0.0]
            return [(k, accepted(a, k)) for a, k in zip(self.acceptance, drafted, strict=True)]
        found = [_adaptive(a) for a in self.acceptance]
        return found if self.rule is DraftRule.RHYME else [*found[:-1], (0.0, 0.0)]


def accepted(acceptance: float, drafted: float) -> float:
    """Return a + a^2 + ... + a^k."""
    return acceptance * (1 - math.pow(acceptance, drafted)) / (1 - acceptance)


def _adaptive(acceptance: float) -> tuple[float, float]:
    """Return the mean drafted and accepted tokens of a step in the long run of doubling and halving.

    The length goes up with chance a^k and down otherwise, so the shares of two neighbours are to each other as up from
    the lower one is to down from the upper one.
    """
    shares = [1.0]
    for lower, upper in pairwise(_LENGTHS):
        shares.append(shares[-1] * acceptance**lower / (1 - acceptance**upper))
    total = sum(shares)
    return (
        sum(share * length for share, length in zip(shares, _LENGTHS, strict=True)) / total,
        sum(share * accepted(acceptance, length) for share, length in zip(shares, _LENGTHS, strict=True)) / total,
    )


def _longest(running: int, slots: int) -> tuple[float, float, float]:
    """Return the calls of each class among the ``running`` longest of ``slots``."""
    third = slots / len(CLASSES)
    long = min(running, third)
    medium = min(running - long, third)
    return long, medium, running - long - medium


def das_budget(
    lengths: Sequence[float], acceptance: Sequence[float], *, pass_seconds: float, token_seconds: float
) -> tuple[float, list[float]]:
    """Return the forward passes N of the least makespan, and each response's draft tokens in all of them (DAS).

    T = pass_seconds N + token_seconds * tokens. Of p draft tokens a response of l tokens accepts
    A(p) = a l (1 - exp(-p / l)): a of the first one, and at most a of the response. It ends with pass N if
    l - A(p) = N, so p = -l ln(1 - (1 - N / l) / a), and 0 where l <= N. T is convex in N.
    """

    def budget(length: float, chance: float, passes: float) -> float:
        return -length * math.log(1 - (1 - passes / length) / chance) if passes < length else 0.0

    def makespan(passes: float) -> float:
        pairs = zip(lengths, acceptance, strict=True)
        tokens = sum(min(passes, length) + budget(length, chance, passes) for length, chance in pairs)
        return pass_seconds * passes + token_seconds * tokens

    most = max(lengths)
    least = max(length * (1 - chance) for length, chance in zip(lengths, acceptance, strict=True))
    low, high = least + 1e-9 * most, most
    for _ in range(_SEARCH_STEPS):
        one, other = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, other) if makespan(one) < makespan(other) else (one, high)
    return high, [budget(length, chance, high) for length, chance in zip(lengths, acceptance, strict=True)]
