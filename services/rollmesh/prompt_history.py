"""Prompt history: what the groups of a prompt have shown so far."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRecord:
    """Sums over all groups of one prompt that ended, filtered ones included; the same for every order of the groups."""

    groups: int
    """Those that were evicted before their end included; they have no members here."""
    members: int
    """Scored trajectories; the sums are over these."""
    solved: int
    """Those with a positive outcome of the verifier, or without one a positive reward."""
    reward_sum: float
    """Sum of the shaped rewards, exact to a millionth per trajectory."""
    token_sum: int
    """Tokens after the prompt."""
    longest: int
    """Tokens of the longest trajectory."""
    train_step: int
    """Newest trained step when a group of the prompt ended."""

    @property
    def mean_tokens(self) -> float | None:
        """Mean number of tokens of a trajectory; None without a scored one."""
        return self.token_sum / self.members if self.members else None


class PromptOutcome(NamedTuple):
    """Facts that one group adds to the record of its prompt at its end; a row in the footer of the next batch file."""

    group_id: str
    """With ``~<number>`` if the group began again after it had ended: it was drawn only once."""
    prompt_id: str
    members: int
    """Scored trajectories."""
    solved: int
    reward_millionths: int
    token_sum: int
    longest: int
    train_step: int
    domain: str = ""
    """Domain of the prompt, whose record it adds to as well; empty without domains."""


def domain_record(domain: str) -> str:
    """Return the name of the record with the sums over all groups of a domain."""
    return f"domain:{domain}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainTotals:
    """Sums over all prompts of one domain since the start of the run."""

    drawn: int
    """Admitted groups."""
    completed: int
    """Scored trajectories of ended groups."""
    solved: int
    """Those with a positive outcome of the verifier, or without one a positive reward."""
    tokens: int
    """Tokens of the completed trajectories, after the prompt."""


class LengthPrediction(NamedTuple):
    """Expected length of a group before it ended, and its true length; in tokens, None when unknown."""

    expected: float | None
    """Mean length in the record of its prompt at the admission."""
    mean: float
    """Mean length of the scored trajectories."""
    first: float | None
    """Length of member 0."""
    rest: float | None
    """Mean length of the other scored trajectories."""
