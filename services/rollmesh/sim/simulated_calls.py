"""Generators of a simulated mesh, and the trajectories that they decode."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rollmesh.sim.event_clock import Alarm
from rollmesh.sim.generator_clock import GeneratorClock
from rollmesh.sim.queue_model import ModelMember
from rollmesh.types import GeneratorRecord, PolicyRecord


class SimulatedTurn(NamedTuple):
    """A turn of a trajectory that another one follows."""

    end: int
    """Sampled tokens of the trajectory at its end."""
    observation_tokens: int
    """Tokens that the environment adds after it."""
    tool_seconds: float
    """Time until it adds them, without a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupWork:
    """Work of one group, the same under every schedule."""

    prompt_id: str
    domain: str = ""
    """Domain of the prompt; empty without domains."""
    place: str
    """Epoch and place of its prompt; groups that repeat the prompt share it."""
    first_answer: int = 0
    """Answers of earlier groups to this prompt in this epoch."""
    prompt_tokens: int
    lengths: Sequence[int]
    """Sampled tokens of each member until its end."""
    rewards: Sequence[float]
    turns: Sequence[Sequence[SimulatedTurn]] = ()
    """Turns of each member before its last one; empty if no member has more than one."""

    def answer_id(self, number: int) -> str:
        """Return the name of a member's answer, the same whether or not the prompt repeats."""
        return f"{self.place}.{self.first_answer + number}"


@dataclass(slots=True, eq=False)
class SimulatedTrajectory:
    """One lease of a trajectory. Records exist only for what is leased or waits for a reward."""

    call: int
    """Number of the lease, never used again."""
    member: ModelMember
    work: GroupWork
    floor: int
    """Oldest policy version that may continue it."""
    segment_tokens: int = 0
    """Tokens of one policy version after which it rests; 0 for no rest."""
    generator: "SimulatedGenerator | None" = None
    """Generator of its call; None while it waits for one and after its end."""
    version: int = -1
    """Policy version of its newest token; -1 before the first."""
    finished_version: int = -1
    """Policy version of its last token, once its call has finished."""
    context_at_call: int = 0
    """Context tokens at the start of the running call."""
    saved_in_call: int = 0
    """Tokens of the running call that are in the queue."""
    has_begun: bool = False
    """True once the queue knows the policy version of its first token."""

    @property
    def remaining(self) -> int:
        """Tokens to its end, from those in the queue."""
        return self.work.lengths[self.member.number] - self.member.tokens

    @property
    def context(self) -> int:
        """Tokens that its next call has to prefill: prompt, sampled tokens, and those of the environment."""
        tokens = self.member.tokens
        context = self.work.prompt_tokens + tokens
        if turns := self._turns:
            context += sum(turn.observation_tokens for turn in turns if turn.end <= tokens)
        return context

    @property
    def new_context(self) -> int:
        """Tokens of the context that no call has prefilled or sampled yet: the prompt, or the newest observation.

        A call that ends before its first token counts as none.
        """
        tokens = self.member.tokens
        if not tokens:
            return self.work.prompt_tokens
        return sum(turn.observation_tokens for turn in turns if turn.end == tokens) if (turns := self._turns) else 0

    @property
    def tool_seconds(self) -> float:
        """Time between the turn that ends with its newest token and the next turn; 0 within a turn."""
        return next((turn.tool_seconds for turn in self._turns if turn.end == self.member.tokens), 0.0)

    def tokens_of_call(self, version: int) -> int:
        """Return the tokens of a call on a generator that serves this version: to the end of a turn or a segment."""
        rest = self.remaining
        if turns := self._turns:
            tokens = self.member.tokens
            rest = next((turn.end - tokens for turn in turns if turn.end > tokens), rest)
        return min(rest, self.segment_tokens - self._in_segment(version)) if self.segment_tokens else rest

    def fills_segment(self, version: int) -> bool:
        """Tell whether the newest token, of this version, is the last one of a segment."""
        return self.segment_tokens > 0 and self._in_segment(version) == 0

    @property
    def _turns(self) -> Sequence[SimulatedTurn]:
        return self.work.turns[self.member.number] if self.work.turns else ()

    def _in_segment(self, version: int) -> int:
        """Return the tokens since the last full segment of this version."""
        saves = self.member.saves
        return sum(save.token_count for save in saves if save.policy_version == version) % self.segment_tokens


@dataclass(slots=True, eq=False)
class SimulatedGenerator:
    """A generator from its start to its end; after a crash another one takes its place under another name."""

    engine: GeneratorClock
    record: GeneratorRecord
    """Registration that the router reads."""
    alarm: Alarm
    """Next event of the engine."""
    started_at: float
    slow_factor: float = 1.0
    serving: PolicyRecord | None = None
    loading: PolicyRecord | None = None
    is_draining: bool = False
    """True while a load waits until the calls of the old version have ended."""
    has_ended: bool = False
    calls: dict[int, SimulatedTrajectory] = field(default_factory=dict)
    waiting: list[SimulatedTrajectory] = field(default_factory=list)
    """Calls without a token that found no free slot or cache."""
    paused_call_seconds: float = 0.0
    """Integral of running calls over the pauses of loads."""
    ended_call_tokens: int = 0
    """Tokens sampled by calls that have ended."""
    counted_tokens: int = 0
    """Tokens of running calls that the router has counted."""

    @property
    def name(self) -> str:
        """Instance id."""
        return self.record.instance_id

    @property
    def version(self) -> int:
        """Policy version that it serves; -1 before the first."""
        return -1 if self.serving is None else self.serving.policy_version

    def register(self) -> None:
        """Write the registration again, after a change of the policy or of the service."""
        serving = self.serving is not None and not self.is_draining and not self.has_ended
        self.record = replace(self.record, policy_version=self.version, serving=serving)
