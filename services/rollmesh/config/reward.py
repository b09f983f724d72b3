"""Reward section: scoring of answers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rollmesh.config.section import Section
from rollmesh.types import LARGEST_REWARD


class RewardConfig(Section):
    """Scoring."""

    verifier: str = "countdown"
    """Verifier of prompts without one: a built-in one (docs/reference/verifiers.md), or ``module:function`` of your
    code."""
    address: str | None = Field(default=None, pattern=r"^(\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):[0-9]{1,5}$")
    """host:port of the reward services. Requests are balanced over every address of the name, so use a headless
    service; null finds the services in the run folder."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the verifier; an unknown option is an error at startup that lists the allowed ones."""
    answer_after: str | None = None
    """Text after whose last occurrence the answer begins, for example ``</think>``; every verifier, your own too, reads
    the answer only. With a closing tag a response without the tags is all answer, and one whose thought is still open
    has none. null: the closing tag if the chat template opens a thought before the answer (``<think>``); else
    verifiers of answers read what follows the thought with which a response begins, and regex and your own function
    all of the response. An empty text: all of it."""
    timeout_seconds: float = Field(default=10.0, gt=0)
    """Time limit per answer; ``on_timeout`` decides the outcome of a time-out."""
    on_timeout: Literal["retry", "unscorable", "dead_letter", "fixed"] = "unscorable"
    """Outcome of a time-out. unscorable: another answer replaces this one in the group; retry: one retry, then
    unscorable; dead_letter: like unscorable, and the trajectory is kept for inspection; fixed: ``fixed_value``. It is
    never a silent 0. A verifier can declare that its time-out means a wrong answer: such an answer is scored 0 and
    marked, independent of this field."""
    on_error: Literal["retry", "unscorable", "dead_letter", "fixed"] = "unscorable"
    """Outcome of a verifier error, with the same choices."""
    fixed_value: float = Field(default=0.0, ge=-LARGEST_REWARD, le=LARGEST_REWARD)
    """Reward that ``fixed`` assigns for training; the outcome kind stays recorded."""
    workers: int = Field(default=1, ge=1, le=1024)
    """Verifier processes per reward service; at most 255 if it runs as root, because each then has its own uid."""
    memory_limit_bytes: int = Field(default=1 << 30, ge=1 << 26)
    """Maximum growth of the address space of a verifier process over its size at startup."""
    overlong_buffer_tokens: int = Field(default=0, ge=0)
    """DAPO's soft overlong penalty: number of last tokens of the budget over which up to -1 is added; 0 is off."""
