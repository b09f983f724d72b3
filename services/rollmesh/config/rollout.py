"""Rollout section: program and limits of a rollout."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rollmesh.config.section import Section
from rollmesh.types import LOWEST_TEMPERATURE


class AgentConfig(Section):
    """Outside agents, which work through the agents service (rollout.program=agent)."""

    contexts: Literal["task", "free"] = "task"
    """task: a session's first call begins with the prompt of its task, which is the same for the whole group; free:
    the agent writes the whole context, and all of it up to the first answer counts as environment tokens."""
    idle_timeout_seconds: float = Field(default=600.0, gt=0)
    """Time after which a session without a call expires: its prompt waits for another session, and its tokens are
    dropped and counted."""


class RolloutConfig(Section):
    """Program and limits of a rollout."""

    program: Literal["single_turn", "environment", "agent"] = "single_turn"
    """single_turn: one answer; environment: turns with ``environment``; agent: an outside agent takes prompts from
    the agents service, samples through its OpenAI-compatible API and posts rewards."""
    agent: AgentConfig = Field(default_factory=AgentConfig)
    """Settings for outside agents."""
    environment: str = "calculator"
    """Environment of multi-turn rollouts: ``calculator`` or ``module:Class``."""
    environment_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    environment_timeout_seconds: float = Field(default=60.0, gt=0)
    """Time limit per turn of the environment; a longer turn fails the attempt."""
    max_turns: int = Field(default=8, ge=1)
    """Maximum number of turns of a multi-turn rollout."""
    max_new_tokens: int = Field(default=512, ge=1)
    """Token budget of a response, environment tokens included."""
    temperature: float = Field(default=1.0, ge=LOWEST_TEMPERATURE)
    """Softmax temperature of training rollouts; 0 is for evaluation only."""
    partial_save_tokens: int = Field(default=64, ge=1, le=8192)
    """Interval of partial saves in tokens, and the most tokens per rollout that kill -9 of a worker loses: generators
    do not run further ahead. Below 32, a call waits for the save of each chunk. An engine may have another default; see
    generator.engine."""
    chunk_timeout_seconds: float = Field(default=60.0, gt=0)
    """Time after which a generator that sends nothing counts as hung; the call continues on another generator from the
    last good token. A call that waits for a slot or a load, or needs long for its next chunk, sends an empty
    chunk every few seconds as long as the engine responds, with SGLang for at most
    generator.sglang.request_timeout_seconds."""
    max_attempts: int = Field(default=5, ge=1)
    """Leases without progress before a trajectory becomes a dead letter; leases to score a finished trajectory after a
    crash of its worker are counted separately."""
    placement: Literal["calls", "tokens"] = "calls"
    """Generator of a call: the one with the fewest calls per slot, or with the fewest context tokens per token of its
    key-value cache, which suits calls of very different lengths. A prompt returns to the generator that has it in its
    cache while that one's load is at most 1/8 higher."""
    worker_concurrency: int = Field(default=1024, ge=1)
    """Maximum number of trajectories that one rollout worker process runs at once."""
