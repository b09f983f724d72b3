"""Length control of drafts: which calls draft how many tokens in the next step, by what earlier drafts have brought.

A call drafts 2 tokens, twice as many after each draft that is accepted whole, up to 16, and half as many after a miss
(RhymeRL); and as many more as a step of the next width has room for. Calls of prompts with short responses draft none
(DAS). All calls together draft while their steps sample more tokens a second than plain steps of as many calls, by the
measured seconds of both; else speculation rests, four times as long after every trial that does not pay.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from rollmesh.generator.engines.engine_protocol import RUNNING_BOUNDS, SpeculationCounters
from rollmesh.generator.engines.torch.drafts import Drafts
from rollmesh.generator.engines.torch.kernels import Int64Array
from rollmesh.generator.engines.torch.sampling import RowOrder
from rollmesh.generator.engines.torch.slots import RunningCall, SlotTable
from rollmesh.types import Int32Array

HISTORY_TOKENS = 10_000_000
"""Most tokens of the drafts of one generator: 150 MB."""
MOST_TOKENS, MOST_CPU_TOKENS = 256, 32
"""Most tokens of a wide step on a GPU and on a CPU, whose products of more rows cost as much as the steps they save."""
WIDTHS = (4, 8, 16)
"""Tokens of a row in wide steps: few shapes, which are prepared once, as graphs on a GPU."""
_LEAST_WIDTH = 8
"""Width up to which a draft that is likely need not grow first."""
_FIRST, _MOST = 2, 16
_SHORT = 0.25
"""Share of the mean length of responses below which those to a prompt are short."""
_PROMPTS = 1 << 16
"""Prompts whose mean length is known."""
_QUIET_MISSES, _LONGEST_QUIET = 16, 32
"""Look-ups in a row that find nothing, after which a call skips steps; and the most steps that it skips."""
_PLAIN_STEPS, _TRIAL_STEPS = 16, 32
"""Plain steps before a trial of drafts, and most steps of the trial."""
_DRAFTING_STEPS, _PLAIN_AGAIN = 128, 4
"""Most steps of later blocks of drafts, and plain steps between them."""
_LEAST_GAINED, _MOST_LOST, _MOST_GAINED = 4, 16, 48
"""Plain steps whose seconds a trial must save; that drafts may lose beyond those saved; and most kept as saved."""
_MARGIN = 1.02
"""Tokens a second over those of plain steps above which drafts count as saving seconds."""
_LEAST_CHANCE = 0.4
"""Chance below which a token is not drafted."""
_LEARNING, _RECOVERY = 1 / 8, 1 / 64
"""Weight of one token in a chance; and of one draft that is left out, so that all are tried again."""
_FIRST_REST, _LONGEST_REST = 1 << 6, 1 << 12
"""Plain steps after drafts that do not pay."""
_UNCOUNTED = 64
"""Most of them until the counters know."""


@dataclass(slots=True)
class _Course:
    """Drafts of one call."""

    prompt_key: int
    is_short: bool
    stops: Sequence[int]
    length: int = _FIRST
    misses: int = 0
    look_at: int = 0
    """Step from which on drafts are looked for."""
    place: int = 0
    """Place in the history at which the newest draft begins, or the next one may if all of it was accepted."""
    next_step: int = 0
    """Step of the draft that may begin there."""


@dataclass(slots=True)
class Gate:
    """Decision to draft with similar numbers of running calls.

    Plain steps are measured, then a block of steps with drafts, then plain steps again, and so on. Every block is
    judged beside the plain steps before and after it, because a machine is not always as fast. The first block after a
    rest is a trial.
    """

    drafting: bool = False
    """Whether a block is running, and not plain steps."""
    on_trial: bool = True
    steps: int = 0
    """Steps of the block, or of the plain steps that are measured."""
    samples: list[float] = field(default_factory=list)
    """Seconds of these plain steps, without the first one, which prepares what the next ones use again."""
    plain: float | None = None
    """Seconds of a plain step before the block; None before a trial."""
    tokens: float = 0.0
    """Tokens of a call in the block: the plain steps that would have sampled them."""
    seconds: float = 0.0
    """Seconds of the block."""
    gained: float = 0.0
    """Plain steps whose seconds the blocks have saved, at most ``_MOST_GAINED``."""
    rest: int = _FIRST_REST
    rests_until: int = 0

    def measure(self, step: int, tokens: float, seconds: float, *, new_plan: bool) -> bool:
        """Record a step with so many ``tokens`` of a call; tell whether the drafts do not pay and rest now.

        One that has made a ``new_plan``, which later ones use again, saves and costs nothing in a trial.
        """
        self.steps += 1
        if self.drafting and self.plain is not None:
            if not (new_plan and self.on_trial):
                self.tokens += tokens
                self.seconds += min(seconds, 4 * self.plain)  # what takes longer is not the step's own
            enough = _TRIAL_STEPS if self.on_trial else _DRAFTING_STEPS
            if self.steps == enough or self.gained + self._saved(self.plain) < -_MOST_LOST:
                self.drafting, self.steps = False, 0
            return False
        if self.steps > 1:
            self.samples.append(seconds)
        if self.steps <= (_PLAIN_STEPS if self.plain is None else _PLAIN_AGAIN):
            return False
        most = 2 * median(self.samples)
        plain = fmean(min(each, most) for each in self.samples)
        if self.plain is not None:
            self.gained = min(self.gained + self._saved((self.plain + plain) / 2), _MOST_GAINED)
            if self.gained < (_LEAST_GAINED if self.on_trial else -_MOST_LOST):
                self.put_off(step + self.rest)
                self.rest = min(4 * self.rest, _LONGEST_REST)
                return True
            if self.gained == _MOST_GAINED:
                self.rest = _FIRST_REST
            self.on_trial = False
        self.drafting, self.steps, self.samples, self.plain, self.tokens, self.seconds = True, 0, [], plain, 0.0, 0.0
        return False

    def put_off(self, until: int) -> None:
        """Draft nothing before a step, and begin with a trial then."""
        self.drafting, self.on_trial, self.steps, self.samples, self.plain = False, True, 0, [], None
        self.tokens, self.seconds, self.gained = 0.0, 0.0, 0.0
        self.rests_until = max(self.rests_until, until)

    def _saved(self, plain: float) -> float:
        """Return the plain steps that the block has saved, where one takes ``plain`` seconds."""
        return self.tokens / _MARGIN - self.seconds / plain


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts of a step, one of each row, some of them empty."""

    drafts: Sequence[Sequence[int]]
    width: int
    """Tokens that the step computes for each row."""

    def inputs(self, last: Sequence[int]) -> list[int]:
        """Return the step's tokens behind the ``last`` one of each row, [rows * width]; zeros behind the drafts."""
        rows = zip(last, self.drafts, strict=True)
        return [token for one, draft in rows for token in (one, *draft, *[0] * (self.width - 1 - len(draft)))]

    def kept(self, tokens: Sequence[Sequence[int]]) -> list[int]:
        """Return how many of each row's ``tokens``, [rows, width], are kept: until one is not the draft's."""
        counts = []
        for draft, sampled in zip(self.drafts, tokens, strict=True):
            count = 0
            while count < len(draft) and sampled[count] == draft[count]:
                count += 1
            counts.append(1 + count)
        return counts


class Speculation:
    """Drafts of the running calls. Model thread only, but for ``counters``."""

    def __init__(self, vocab_size: int, most_tokens: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.most_tokens = most_tokens
        """Most tokens of a wide step."""
        self._chances = [1.0] * vocab_size
        """Chance that the token drafted behind a token is accepted."""
        self.drafts = Drafts(HISTORY_TOKENS)
        self._courses: dict[int, _Course] = {}
        """By slot."""
        self._lengths: OrderedDict[int, float] = OrderedDict()
        """Mean length of the newest responses by prompt, the newest prompt last."""
        self._length_sum = 0.0
        """Sum of the mean lengths."""
        self.gates = [Gate() for _ in range(len(RUNNING_BOUNDS) + 1)]
        """By the class of running calls."""
        self._step = 0
        self._drafted = self._accepted = 0
        self._row_steps = [0] * len(self.gates)
        self._row_tokens = [0] * len(self.gates)

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
        is_short = self._lengths.get(key, mean) < _SHORT * mean
        self._courses[call.slot] = _Course(key, is_short, request.sampling.stop_token_ids)

    def end(self, call: RunningCall, *, finished: bool) -> None:
        """Forget a call that leaves its slot; the response of one that has ``finished`` is drafted from now on."""
        del self._courses[call.slot]
        if finished:
            ids, prompt = call.context_ids(), call.request.prompt_token_count
            self.remember(ids[:prompt], ids[prompt:])

    def remember(self, prompt_ids: Int32Array, response_ids: Int32Array) -> None:
        """Draft from a response to a prompt from now on."""
        key, length = hash(prompt_ids.tobytes()), len(response_ids)
        self.drafts.add(key, prompt_ids, response_ids)
        before = self._lengths.pop(key, None)
        mean = self._lengths[key] = length if before is None else before + (length - before) / 4
        self._length_sum += mean - (before or 0.0)
        if len(self._lengths) > _PROMPTS:
            self._length_sum -= self._lengths.popitem(last=False)[1]

    def forget(self) -> None:
        """Drop all drafts and what is known of them."""
        self.drafts.clear()
        self._lengths.clear()
        self._length_sum = 0.0

    def begin_step(self, rows: int) -> int:
        """Begin a step of ``rows`` calls; or return the plain ones that come instead and are not measured."""
        resting = self.gates[_class_of(rows)].rests_until - self._step
        if rows * WIDTHS[0] > self.most_tokens:
            resting = _UNCOUNTED
        if resting > 0:
            return min(resting, _UNCOUNTED)
        self._step += 1
        return 0

    def rested(self, rows: int, steps: int) -> None:
        """Count plain steps of ``rows`` calls that were not measured."""
        self._step += steps
        self._count(rows, steps * rows, steps)

    def _count(self, rows: int, tokens: int, steps: int = 1) -> None:
        number = _class_of(rows)
        self._row_steps[number] += steps * rows
        self._row_tokens[number] += tokens

    def drafts_with(self, rows: int) -> bool:
        """Tell whether the step of ``rows`` calls that has begun may use drafts."""
        return self.gates[_class_of(rows)].drafting

    def propose(self, order: RowOrder, tokens: Sequence[int], table: SlotTable, free_places: int) -> Proposal | None:
        """Return drafts of the active calls, whose last tokens are ``tokens``; None for a plain step.

        ``free_places`` are the tokens that fit in every row of the cache.
        """
        rows = len(order.slots)
        most = min(self.most_tokens // rows, free_places)
        widths = [width for width in WIDTHS if width <= most]
        if not widths:
            return None
        drafts = [
            self._draft(self._courses[slot], slot, last, table, widths[-1])
            for slot, last in zip(order.slots.tolist(), tokens, strict=True)
        ]
        room = [widths[-1]] * rows
        if order.steps_left < widths[-1]:
            left = table.room(order.slots)
            order.steps_left, room = int(left.min()), left.tolist()
        longest = max(min(likely, here - 1) for (likely, _), here in zip(drafts, room, strict=True))
        if not longest:
            return None
        width = next(width for width in widths if width > longest)
        cut = [draft[: min(width, here) - 1] for (_, draft), here in zip(drafts, room, strict=True)]
        return Proposal(cut, width)

    def _draft(self, course: _Course, slot: int, last: int, table: SlotTable, widest: int) -> tuple[int, list[int]]:
        """Return what follows the ``last`` token of a call up to a stop id, and how much of it before is likely."""
        if course.is_short or course.look_at > self._step or course.prompt_key not in self._lengths:
            return 0, []
        chances = self._chances
        chance = chances[last]
        if chance < _LEAST_CHANCE:
            chances[last] += (1 - chance) * _RECOVERY
            return 0, []
        place = course.place if course.next_step == self._step else 0
        if not place or self.drafts.tokens(place - 1, 1)[0] != last:
            place = self._find(course, table.recent(slot))
        if not place:
            return 0, []
        draft: list[int] = []
        likely, most = 0, max(course.length, _LEAST_WIDTH) - 1
        for token in self.drafts.tokens(place, widest - 1).tolist():
            if token < 0 or token in course.stops:
                break
            draft.append(token)
            if likely == len(draft) - 1 < most and chance >= _LEAST_CHANCE:
                likely += 1
                chance *= chances[token]
        course.place = place
        return likely, draft

    def _find(self, course: _Course, recent: bytes) -> int:
        """Return the place in the history of the token that is expected next; 0 if there is none."""
        match = self.drafts.find(course.prompt_key, recent)
        if match is not None:
            course.misses = 0
            return match.start
        course.misses += 1
        if course.misses >= _QUIET_MISSES:
            course.look_at = self._step + min(1 << course.misses - _QUIET_MISSES, _LONGEST_QUIET)
        return 0

    def verified(self, slots: Int64Array, tokens: Sequence[int], proposal: Proposal, kept: Sequence[int]) -> None:
        """Record a wide step behind the last ``tokens`` of each row: the number of tokens that are ``kept``."""
        chances = self._chances
        for slot, last, draft, count in zip(slots.tolist(), tokens, proposal.drafts, kept, strict=True):
            course, accepted, before = self._courses[slot], count - 1, last
            if draft:
                for at, token in enumerate(draft[:count]):
                    chances[before] += ((at < accepted) - chances[before]) * _LEARNING
                    before = token
                self._drafted += len(draft)
                self._accepted += accepted
                course.length = next_length(course.length, len(draft), accepted)
                if accepted == len(draft):
                    course.place, course.next_step = course.place + count, self._step + 1

    def measure(self, rows: int, tokens: int, seconds: float, *, new_plan: bool = False) -> None:
        """Record the seconds of a step of ``rows`` calls that has sampled ``tokens``; see ``Gate.measure``."""
        self._count(rows, tokens)
        number = _class_of(rows)
        gate = self.gates[number]
        if gate.measure(self._step, tokens / rows, seconds, new_plan=new_plan):
            for other in self.gates[number:]:  # the more calls, the less do drafts bring
                other.put_off(gate.rests_until)


def next_length(length: int, drafted: int, accepted: int) -> int:
    """Return the tokens of the next draft after one of ``length``, or of ``drafted`` tokens if there were fewer."""
    return min(2 * length, _MOST) if accepted >= min(length, drafted) else max(_FIRST, length // 2)


def _class_of(rows: int) -> int:
    """Return the number of the class in ``RUNNING_BOUNDS`` that has these running calls."""
    return min((rows - 1).bit_length(), len(RUNNING_BOUNDS))
