"""Records of the queue model: groups, their members, the saves of a member, and the places of members in the queues."""

import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from rollmesh.mesh import ResumeOrder, RunLimits
from rollmesh.types import TrajectoryState

MOST_MEMBERS_AT_ONCE = 100
"""Members whose records the store deletes in one step; it sweeps those of a larger group in slices."""
ENDED_WITHOUT_SCORE = (TrajectoryState.UNSCORABLE, TrajectoryState.DEAD)
ORDERS_PER_GROUP = 4096
"""Number of places in the queues for the members of a group."""
TERMINAL = (TrajectoryState.SCORED, TrajectoryState.SURPLUS, *ENDED_WITHOUT_SCORE)
_LAST_RANK = 127
_LN_2 = math.log(2)
_GROUPS_PER_BLOCK = 2048
"""Number of places for the groups of a block that have the same rank."""


class Save(NamedTuple):
    """Tokens of one save, all of one policy version."""

    token_count: int
    policy_version: int
    first_id: int = 0
    """Distinguishes these tokens from those of other saves."""


class GroupState(StrEnum):
    """State of a group in the queue."""

    OPEN = "open"
    READY = "ready"
    CUT = "cut"
    ASIDE = "aside"
    """Set aside without tokens until it is recalled; not counted as admitted."""


@dataclass(slots=True, eq=False)
class ModelMember:
    """One trajectory."""

    group: "ModelGroup"
    trajectory_id: str
    number: int
    """Position in the group, from 0."""
    state: TrajectoryState = TrajectoryState.PENDING
    session: str | None = None
    """Session that holds it; after its score, the one that scored it."""
    attempts: int = 0
    """Leases without token progress, the current one included."""
    scorings: int = 0
    """Leases to score it, once finished."""
    incarnation: int = 0
    tokens: int = 0
    saves: list[Save] = field(default_factory=list)
    tokens_at_lease: int | None = -1
    """Tokens at the last lease; -1 before the first, None after a restart: then no number of tokens is progress."""
    step: int | None = None
    """Smallest train_step among the policy versions of its tokens in the loss."""
    birth_version: int | None = None
    """Newest policy version at the first lease."""
    reward: float | None = None
    worker_reward: float | None = None
    """Reward before the group shaper changed it; None if it did not."""
    teacher: bytes = b""
    """Scores of a teacher, as Redis has them; empty without any."""
    kept_tokens: int | None = None
    """Tokens that the group shaper kept; None for all."""
    is_wasted: bool = False
    """True if its tokens were counted as wasted, so that a drop of its group does not count them again."""
    is_fork: bool = False
    """True for a member that an agent has beside its first one; it has no replacement."""

    @property
    def order(self) -> int:
        """Position in admission order: the members of the oldest group first."""
        return self.group.index * ORDERS_PER_GROUP + self.number

    @property
    def kept_saves(self) -> list[Save]:
        """Saves up to the kept tokens, as a batch has them."""
        if self.kept_tokens is None:
            return self.saves
        found, left = list[Save](), self.kept_tokens
        for save in self.saves:
            if left > 0:
                found.append(save._replace(token_count=min(left, save.token_count)))
            left -= save.token_count
        return found

    @property
    def wasted_tokens(self) -> int:
        """Tokens that were counted as wasted before its group is dropped."""
        if self.is_wasted:
            return self.tokens
        return 0 if self.kept_tokens is None else self.tokens - self.kept_tokens


class ModelRound(NamedTuple):
    """One round of a group."""

    first: int
    """Number of its first member."""
    needed: int
    launched: int
    plan: str = "{}"
    """Plan as JSON."""


@dataclass(slots=True, eq=False)
class ModelGroup:
    """One admitted group."""

    group_id: str
    index: int
    """Admission index."""
    needed: int
    spare: int = 0
    """Members launched beyond ``needed``; the surplus is cut off."""
    members: list[ModelMember] = field(default_factory=list)
    state: GroupState = GroupState.OPEN
    prompt_id: str = ""
    """Prompt in the history; empty without one."""
    domain: str = ""
    """Domain of the prompt in the history; empty without one."""
    expected_tokens: float | None = None
    """Expected length of a trajectory at the admission."""
    start_rank: int | None = None
    """Groups of a lower rank start first, within blocks of groups; None for admission order."""
    rounds: list[ModelRound] = field(default_factory=list)
    """Rounds so far; empty for a group that ends without a decision of the leader."""
    is_closed: bool = False
    """True after the last of several rounds."""
    admitted_at: float | None = None
    """Time of the admission; None for a group that began again."""
    has_ended: bool = False
    """True for a group that began again after it was ready; the model loses no end by a restore."""
    incarnation: int = 0
    """Incarnation of the members that it will get."""
    scored: int = 0
    scored_tokens: int = 0
    """Tokens of the scored members."""
    cut_tokens: int = 0
    """Those after the kept tokens of their members, which no batch has."""
    terminal: int = 0
    step: int | None = None
    """Smallest train_step among the tokens of its members that are in the loss."""

    @property
    def has_decisions(self) -> bool:
        """True while the leader decides at the end of each round."""
        return bool(self.rounds) and not self.is_closed

    def round_of(self, member: ModelMember) -> int:
        """Return the round that launched a member."""
        return max((at for at, each in enumerate(self.rounds) if each.first <= member.number), default=0)

    @property
    def rewards(self) -> list[float]:
        """Rewards of the scored members."""
        return [m.reward for m in self.members if m.state is TrajectoryState.SCORED and m.reward is not None]


class ScoredSet:
    """Members by a score, with the smallest first; a member may leave from any place.

    Most members come in the order of their scores: these wait in a line, and only the others in a heap.
    """

    def __init__(self) -> None:
        self._scores: dict[str, int] = {}
        self._line: deque[tuple[int, str]] = deque()
        self._heap: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._scores)

    def __contains__(self, name: str) -> bool:
        return name in self._scores

    def add(self, name: str, score: int) -> None:
        """Add a member, or change its score."""
        self._scores[name] = score
        entry = (score, name)
        if not self._line or self._line[-1] <= entry:
            self._line.append(entry)
        else:
            heapq.heappush(self._heap, entry)
        if len(self._line) + len(self._heap) > 64 + 2 * len(self._scores):
            self._line, self._heap = deque(sorted((score, name) for name, score in self._scores.items())), []

    def score(self, name: str) -> int:
        """Return the score of a member; raises KeyError if it is not there."""
        return self._scores[name]

    def discard(self, name: str) -> None:
        """Remove a member if it is there; its entry is skipped later."""
        self._scores.pop(name, None)

    def first(self) -> str | None:
        """Return the member with the smallest score; None if the set is empty."""
        scores, line, heap = self._scores, self._line, self._heap
        while line and scores.get(line[0][1]) != line[0][0]:
            line.popleft()
        while heap and scores.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        if line and heap:
            return min(line[0], heap[0])[1]
        return line[0][1] if line else heap[0][1] if heap else None


def length_bucket(tokens: float) -> int:
    """Return the bucket of a length, floor(4 log2(tokens + 1))."""
    return math.floor(math.log(tokens + 1) / _LN_2 * 4)


def start_place(member: ModelMember, limits: RunLimits) -> int:
    """Return the place of a member without tokens: by the start rank of its group, else in admission order."""
    rank = member.group.start_rank
    return member.order if rank is None else _ranked_place(member, rank, limits)


def resume_place(member: ModelMember, limits: RunLimits) -> int:
    """Return the place of a partial trajectory, by the resume order of the run."""
    match limits.resume_order:
        case ResumeOrder.MOST_TOKENS:
            return _ranked_place(member, _LAST_RANK - _rank_of_length(member.tokens), limits)
        case ResumeOrder.NEAREST_END:
            return _ranked_place(member, _rank_by_end(member.group, member.tokens), limits)
        case ResumeOrder.ADMISSION:
            return member.order


def _ranked_place(member: ModelMember, rank: int, limits: RunLimits) -> int:
    block, position = divmod(member.group.index - 1, limits.groups_per_batch)
    group_place = (block * (_LAST_RANK + 1) + rank) * _GROUPS_PER_BLOCK + position
    return group_place * ORDERS_PER_GROUP + member.number


def _rank_of_length(tokens: float) -> int:
    return min(_LAST_RANK - 1, length_bucket(max(0, tokens)))


def _rank_by_end(group: ModelGroup, tokens: int) -> int:
    """Return the rank by the tokens to the mean length of the scored siblings; last without one, and past it."""
    left = group.scored_tokens / group.scored - tokens if group.scored else 0
    return _rank_of_length(left) if left > 0 else _LAST_RANK
