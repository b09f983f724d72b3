"""Facts about a group whose members have all ended, as planners and group shapers read them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberOutcome:
    """One scored member of a group."""

    member_index: int
    round: int
    """Round that launched the member, from 0."""
    outcome: float
    """Value of the verifier, before any shaping."""
    shaped_reward: float
    """Reward after the shaping of single trajectories."""
    token_count: int
    """Tokens after the prompt."""
    truncated: bool
    """True if the token budget or the context length ended the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """A group without a running member, which waits for its next round or for its end."""

    group_id: str
    prompt_id: str
    domain: str
    """Domain of its prompt; empty without domains."""
    train_step: int
    """Newest trained step."""
    round: int
    """Its newest round, from 0."""
    launched: int
    """Members launched in all rounds, unscorable ones included."""
    members: tuple[MemberOutcome, ...]
    """Scored members in the order of their index."""
