"""Length control of drafts: which calls draft how many tokens in the next step, by what earlier drafts have brought.

A call drafts 2 tokens, twice as many after each draft that is accepted whole, up to 16, and half as many after a miss
(RhymeRL); and as many more as the width of such a step has room for. Calls of prompts with short responses draft
nothing (DAS). All calls together draft while their steps sample more tokens a second than plain steps of as many calls,
by the measured seconds of both; else speculation pauses, four times as long after every trial that does not pay.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rollmesh.generator.engines.engine_protocol import RUNNING_BOUNDS, SpeculationCounters
from rollmesh.generator.engines.torch.drafts import Drafts
from rollmesh.generator.engines.torch.kernels import Int64Array
from rollmesh.generator.engines.torch.slots import RunningCall, SlotTable

HISTORY_TOKENS = 10_000_000
"""Most tokens of the drafts of one generator: 150 MB."""
MOST_TOKENS = 256
"""Most tokens of a wide step."""
WIDTHS = (4, 8, 16)
"""Tokens of each row in wide steps: few shapes, which are prepared once, as graphs on a GPU."""
_FIRST, _MOST = 2, 16
_SHORT = 0.25
"""Share of the mean length of responses below which those to a prompt are short."""
_PROMPTS = 1 << 16
"""Prompts whose mean length is known."""
_QUIET_MISSES, _LONGEST_QUIET = 16, 32
"""Look-ups in a row that find nothing, after which a call skips steps; and the most steps that it skips."""
_MOST_LOST = 8
"""Plain steps whose seconds a trial may lose before it ends early."""
_TRIAL, _FIRST_PAUSE, _LONGEST_PAUSE = 32, 1 << 10, 1 << 13
"""Steps of a trial, and of a pause."""
_REFRESH, _REFRESHED = 128, 4
"""Of so many steps with drafts, so many are plain, and measured."""
_MEASURED = 16
"""Of so many steps of a pause, one is measured: a look at the clock takes a percent of a small model's step."""
_WEIGHT = 1 / 16
_MARGIN = 1.05
"""Worth of the steps of a trial over their seconds above which drafts go on, until it is below 1."""
_LEARNING, _RECOVERY = 1 / 8, 1 / 64
"""Weight of one token in a chance; and of one draft that is not used, so that all are tried again."""
_LEAST_CHANCE = 0.5
"""Chance below which a token is not drafted."""


@dataclass(slots=True)
class _Course:
    """Drafts of one call."""

    prompt_key: int
    is_short: bool
    length: int = _FIRST
    place: int = 0
    """Place in the history of the token that is expected next; 0 to look for it."""
    misses: int = 0
    look_at: int = 0
    """Step from which on drafts are looked for."""


@dataclass(slots=True)
class _Class:
    """Speculation with similar numbers of running calls."""

    steps: int = 0
    """Steps since the last pause."""
    worth: float = 0.0
    """Seconds that plain steps would have needed for the tokens of the newest steps."""
    seconds: float = 0.0
    """Seconds of the newest steps."""
    pause: int = _FIRST_PAUSE
    paused_until: int = 0


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts of a step."""

    width: int
    """Tokens of each row in the step: the last one of its call, and a draft of at most ``width`` - 1."""
    drafts: Mapping[int, Sequence[int]]
    """By row."""

    def kept(self, tokens: Int64Array) -> Int64Array:
        """Return how many of the sampled ``tokens`` [rows, width] are kept: until one is not the draft's, [rows]."""
        counts = np.ones(len(tokens), np.int64)
        for row, draft in self.drafts.items():
            for sampled, drafted in zip(tokens[row].tolist(), draft, strict=False):
                if sampled != drafted:
                    break
                counts[row] += 1
        return counts


class Speculation:
    """Drafts of the running calls. Model thread only, but for ``counters``."""

    def __init__(self, slot_count: int, vocab_size: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.drafts = Drafts(HISTORY_TOKENS)
        self._courses: dict[int, _Course] = {}
        """By slot."""
        self._lengths: OrderedDict[int, float] = OrderedDict()
        """Mean length of the newest responses by prompt, the newest prompt last."""
        self._length_sum = 0.0
        """Sum of the mean lengths."""
        self._plain_seconds = np.zeros(slot_count + 1)
        """Seconds of a plain step by running calls; 0 if unknown."""
        self._wide_seconds: dict[tuple[int, int], float] = {}
        """Seconds of a step that looks for drafts by the class of running calls and its width."""
        self._chances = [1.0] * vocab_size
        """Chance that the token drafted behind a token is accepted."""
        self._classes = [_Class() for _ in range(len(RUNNING_BOUNDS) + 1)]
        self._step = 0
        self.looked = False
        """Whether the newest step looked for drafts."""
        self._width = 1
        self._drafted = self._accepted = 0
        self._row_steps = [0] * len(self._classes)
        self._row_tokens = [0] * len(self._classes)

    @property
    def counters(self) -> SpeculationCounters:
        return SpeculationCounters(
            drafted_token_total=self._drafted,
            accepted_token_total=self._accepted,
            draft_bytes=self.drafts.bytes_used,
            row_steps=tuple(self._row_steps),
            row_tokens=tuple(self._row_tokens),
        )

    def begin(self, call: RunningCall) -> None:
        """Start the drafts of a call that has got its slot."""
        request = call.request
        key = hash(request.context_ids[: request.prompt_token_count].tobytes())
        mean = self._length_sum / max(1, len(self._lengths))
        self._courses[call.slot] = _Course(key, self._lengths.get(key, mean) < _SHORT * mean)

    def end(self, call: RunningCall, *, finished: bool) -> None:
        """Forget a call that leaves its slot; the response of one that has ``finished`` is drafted from now on."""
        course = self._courses.pop(call.slot)
        if not finished:
            return
        ids, prompt = call.context_ids(), call.request.prompt_token_count
        self.drafts.add(course.prompt_key, ids[:prompt], ids[prompt:])
        length = len(ids) - prompt
        before = self._lengths.pop(course.prompt_key, None)
        mean = self._lengths[course.prompt_key] = length if before is None else before + (length - before) / 4
        self._length_sum += mean - (before or 0.0)
        if len(self._lengths) > _PROMPTS:
            self._length_sum -= self._lengths.popitem(last=False)[1]

    def forget(self) -> None:
        """Drop all drafts and what is known of them."""
        self.drafts.clear()
        self._lengths.clear()
        self._length_sum = 0.0
        for course in self._courses.values():
            course.place = 0

    def rests(self, rows: int) -> bool:
        """Tell whether the next step of ``rows`` calls is a plain one that need not be measured, and count it if so."""
        number = _class_of(rows)
        if self._step + 1 >= self._classes[number].paused_until or not (self._step + 1) % _MEASURED:
            return False
        self._step += 1
        self._row_steps[number] += rows
        self._row_tokens[number] += rows
        return True

    def propose(
        self, slots: Int64Array, last: Callable[[], Int64Array], table: SlotTable, free_places: Callable[[], int]
    ) -> Proposal | None:
        """Return drafts of the active calls in ``slots``; None for a plain step.

        ``last`` returns their last tokens, [rows], and ``free_places`` the tokens that fit in every row of the cache.
        """
        self._step += 1
        self.looked, self._width = False, 1
        rows, state = len(slots), self._classes[_class_of(len(slots))]
        if self._step < state.paused_until or rows * WIDTHS[0] > MOST_TOKENS:
            return None
        if not self._plain_seconds[rows] or self._step % _REFRESH < _REFRESHED:
            return None
        self.looked = True
        drafts: dict[int, list[int]] = {}
        expected: list[list[float]] = []
        for row, (slot, before) in enumerate(zip(slots.tolist(), last().tolist(), strict=True)):
            course, chance = self._courses[slot], self._chances[before]
            if course.is_short or course.look_at > self._step:
                continue
            if chance < _LEAST_CHANCE:
                self._chances[before] += (1 - chance) * _RECOVERY
                course.place = 0
                continue
            if course.place or self._find(course, table, slot):
                found, chances = self._cut(course, table.calls[slot])
                if found:
                    drafts[row] = found
                    expected.append(chances)
                else:
                    course.place = 0
        width = self._paying_width(rows, expected, free_places) if drafts else 1
        if width == 1:
            for row in drafts:
                self._courses[int(slots[row])].place = 0
            return None
        self._width = width
        room = table.room(slots).tolist()
        for row, draft in drafts.items():
            del draft[max(0, min(width, room[row]) - 1) :]
        return Proposal(width, drafts)

    def _paying_width(self, rows: int, expected: Sequence[Sequence[float]], free_places: Callable[[], int]) -> int:
        """Return the width of the step with the most tokens a second; 1 is a plain step."""
        plain, number = self._plain_seconds[rows], _class_of(rows)
        best, width, most = rows / plain, 1, min(MOST_TOKENS // rows, free_places())
        longest = max(map(len, expected))
        for each in WIDTHS:
            if each > most:
                break
            seconds = self._wide_seconds.get((number, each), plain)
            rate = (rows + sum(sum(chances[: each - 1]) for chances in expected)) / seconds
            if rate > best:
                best, width = rate, each
            elif (number, each) in self._wide_seconds:
                self._wide_seconds[number, each] -= (seconds - plain) * _RECOVERY
            if each > longest:
                break
        return width

    def _find(self, course: _Course, table: SlotTable, slot: int) -> bool:
        match = self.drafts.find(course.prompt_key, table.recent(slot))
        if match is None:
            course.misses += 1
            quiet = course.misses - _QUIET_MISSES
            if quiet >= 0:
                course.look_at = self._step + min(1 << quiet, _LONGEST_QUIET)
            return False
        course.misses, course.place = 0, match.start
        return True

    def _cut(self, course: _Course, call: RunningCall | None) -> tuple[list[int], list[float]]:
        """Return the tokens of a draft, and the chance of each that it is accepted.

        A draft ends before a stop id, and where the chance becomes small.
        """
        assert call is not None
        stops = call.request.sampling.stop_token_ids
        found = self.drafts.tokens(course.place - 1, next((w for w in WIDTHS if w > course.length), WIDTHS[-1]))
        chance, chances = 1.0, list[float]()
        for before, token in pairwise(found):
            chance *= self._chances[before]
            if token in stops:
                break
            if chance < _LEAST_CHANCE:
                break
            chances.append(chance)
        return found[1 : len(chances) + 1], chances

    def verified(self, slots: Int64Array, proposal: Proposal, kept: Sequence[int], last: Sequence[int]) -> None:
        """Record a wide step: the number of tokens ``kept`` of each row, and the ``last`` of them, by row."""
        for row, draft in proposal.drafts.items():
            course, accepted = self._courses[int(slots[row])], kept[row] - 1
            self._drafted += len(draft)
            self._accepted += accepted
            for at, before in enumerate(self.drafts.tokens(course.place - 1, min(accepted + 1, len(draft)))):
                self._chances[before] += ((at < accepted) - self._chances[before]) * _LEARNING
            course.length = next_length(course.length, len(draft), accepted)
            if accepted < len(draft):
                course.place = 0
                continue
            following = self.drafts.tokens(course.place + accepted, 1)
            course.place = course.place + accepted + 1 if following == [last[row]] else 0

    def measure(self, rows: int, tokens: int, seconds: float) -> None:
        """Record the seconds of a step of ``rows`` calls that has sampled ``tokens``."""
        number = _class_of(rows)
        self._row_steps[number] += rows
        self._row_tokens[number] += tokens
        known = self._plain_seconds[rows]
        if not self.looked:
            if self._step % _REFRESH:  # the first plain step after others prepares what the next ones use again
                self._plain_seconds[rows] = _towards(known or seconds, seconds)
            return
        shape = number, self._width
        before = self._wide_seconds.get(shape)
        self._wide_seconds[shape] = known if before is None else _towards(before, seconds)
        if before is None:
            return  # the first step of a shape prepares it
        state = self._classes[number]
        state.steps += 1
        keep = 1 - _WEIGHT / 4
        state.worth = keep * state.worth + known * tokens / rows
        # As ``worth``, by what such steps need undisturbed: most that a step takes longer is not its own.
        state.seconds = keep * state.seconds + self._wide_seconds[shape]
        lost = state.seconds - state.worth > _MOST_LOST * known
        if lost or state.steps % _TRIAL == 0:
            if not lost and state.worth > (_MARGIN if state.steps == _TRIAL else 1.0) * state.seconds:
                state.pause = _FIRST_PAUSE
            else:
                state.paused_until = self._step + state.pause
                state.pause = min(4 * state.pause, _LONGEST_PAUSE)
                state.steps, state.worth, state.seconds = 0, 0.0, 0.0


def next_length(length: int, drafted: int, accepted: int) -> int:
    """Return the tokens of the next draft after one of ``length``, or of ``drafted`` tokens if there were fewer."""
    return min(2 * length, _MOST) if accepted >= min(length, drafted) else max(_FIRST, length // 2)


def _towards(known: float, seconds: float) -> float:
    """Return the mean seconds of steps after another one; a step that was disturbed counts as twice the mean."""
    return known + (min(seconds, 2 * known) - known) * _WEIGHT


def _class_of(rows: int) -> int:
    """Return the number of the class in ``RUNNING_BOUNDS`` that has these running calls."""
    return min((rows - 1).bit_length(), len(RUNNING_BOUNDS))
