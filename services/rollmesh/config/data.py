"""Where prompts come from, how answers are scored, and what a rollout may do."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rollmesh.config.section import Section
from rollmesh.types import LOWEST_TEMPERATURE


class CountdownSource(Section):
    """Countdown search: digits and a target; the demo task (generated, endless)."""

    type: Literal["countdown"] = "countdown"
    min_numbers: int = Field(default=5, ge=2, le=9)
    """Fewest distinct digits in a puzzle."""
    max_numbers: int = Field(default=8, ge=2, le=9)
    """Most distinct digits in a puzzle."""


class JsonlSource(Section):
    """One JSON object per line; fields name the prompt and what the verifier needs."""

    type: Literal["jsonl"] = "jsonl"
    path: str
    """File with one JSON object per line."""
    prompt_field: str = "prompt"
    """Field with the prompt text (or a list of chat messages)."""
    answer_field: str | None = "answer"
    """Field with the reference answer, handed to the verifier as ``answer``; null if there is none."""
    verifier_field: str | None = None
    """Field that names the verifier per row; null uses reward.verifier for all rows."""
    chat: bool = False
    """Render prompts with the tokenizer's chat template."""


class ParquetSource(JsonlSource):
    """Like jsonl, from a Parquet file (extra: datasets)."""

    type: Literal["parquet"] = "parquet"  # type: ignore[assignment]


class ReasoningGymSource(Section):
    """A reasoning-gym task (extra: reward); scored by the task's own verifier."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    task: str
    """Name of the reasoning-gym dataset, for example ``chain_sum``."""
    size: int = Field(default=10_000, ge=1)
    """Items per epoch."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to ``reasoning_gym.create_dataset``."""
    chat: bool = False
    """Render prompts with the tokenizer's chat template."""


class PythonSource(Section):
    """A callable ``module:function`` returning a sequence of {"prompt": ..., "answer": ...} rows."""

    type: Literal["python"] = "python"
    target: str = Field(pattern=r"^[\w.]+:\w+$")
    """``module:function``; called with ``options`` as keyword arguments."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the callable."""
    chat: bool = False
    """Render prompts with the tokenizer's chat template."""


PromptSourceConfig = Annotated[
    CountdownSource | JsonlSource | ParquetSource | ReasoningGymSource | PythonSource, Field(discriminator="type")
]


class DataConfig(Section):
    """Prompts."""

    source: PromptSourceConfig = Field(default_factory=CountdownSource)
    """Training prompts."""
    evaluation_source: PromptSourceConfig | None = None
    """Evaluation prompts; null takes them from ``source``: fresh ones of a generated task, held-out rows of a table."""
    held_out_ratio: float = Field(default=0.05, ge=0, lt=1)
    """Share of a table's distinct prompts that is kept from training when there is no ``evaluation_source``; 0
    evaluates on the training rows."""
    shuffle: bool = True
    """Shuffle every epoch with the run's seed."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longer prompts are an error that names the row."""


class RewardConfig(Section):
    """Scoring."""

    verifier: str = "countdown"
    """Verifier for prompts that name none: exact, numeric, choice, math, countdown, reasoning_gym, python_code,
    regex, http_judge, composite, or ``module:function`` of your own."""
    address: str | None = Field(default=None, pattern=r"^(\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):[0-9]{1,5}$")
    """host:port of the reward services. Every address behind the name gets its share, so a headless service is meant;
    null finds the services in the run folder."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the verifier; a wrong one ends the start with the list of those allowed."""
    timeout_seconds: float = Field(default=10.0, gt=0)
    """Limit per answer; what a time-out means is ``on_timeout``."""
    on_timeout: Literal["retry", "unscorable", "dead_letter", "fixed"] = "unscorable"
    """unscorable: another answer takes its place in the group; retry: once more, then unscorable; dead_letter: like
    unscorable, and the trajectory is kept to be looked into; fixed: ``fixed_value``; never a silent 0. A verifier can
    declare that its time-out means a wrong answer: that is scored 0 and marked, whatever stands here."""
    on_error: Literal["retry", "unscorable", "dead_letter", "fixed"] = "unscorable"
    """The same choice for verifier errors."""
    fixed_value: float = 0.0
    """Value that ``fixed`` assigns, and that the member is trained with; the outcome kind stays visible."""
    workers: int = Field(default=1, ge=1)
    """Verifier processes per reward service."""
    memory_limit_bytes: int = Field(default=1 << 30, ge=1 << 26)
    """Address space that a verifier process may add to what it starts with."""
    overlong_buffer_tokens: int = Field(default=0, ge=0)
    """DAPO's soft overlong penalty: the last tokens of the budget over which up to -1 is added; 0 is off."""


class AgentConfig(Section):
    """Agents outside of the mesh, which work through the gateway (rollout.program=agent)."""

    contexts: Literal["task", "free"] = "task"
    """task: a session's first call begins with the prompt of its task, which is the same for the whole group; free:
    the agent writes the whole context itself, and all of it up to the first answer counts as the environment's."""
    idle_timeout_seconds: float = Field(default=600.0, gt=0)
    """A session without a call for so long is given up: its prompt waits for another session, and its tokens are
    dropped and counted."""


class RolloutConfig(Section):
    """What a rollout is."""

    program: Literal["single_turn", "environment", "agent"] = "single_turn"
    """single_turn: one answer; environment: turns with the environment named below; agent: an agent outside of the mesh
    takes prompts from the gateway, samples through its OpenAI-compatible API and posts rewards."""
    agent: AgentConfig = Field(default_factory=AgentConfig)
    """Agents outside of the mesh."""
    environment: str = "calculator"
    """Environment of multi-turn rollouts: ``calculator`` or ``module:Class``."""
    environment_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    environment_timeout_seconds: float = Field(default=60.0, gt=0)
    """Limit per turn of the environment; a turn that takes longer fails the attempt."""
    max_turns: int = Field(default=8, ge=1)
    """Most turns of a multi-turn rollout."""
    max_new_tokens: int = Field(default=512, ge=1)
    """Token budget of a response, environment tokens included."""
    temperature: float = Field(default=1.0, ge=LOWEST_TEMPERATURE)
    """Softmax temperature of training rollouts; 0 is for evaluation only."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Must be 1 for training: the logprobs are over the full vocabulary."""
    top_k: int = Field(default=0, ge=0)
    """Must be 0 for training."""
    partial_save_tokens: int = Field(default=64, ge=1, le=8192)
    """What kill -9 of a worker can lose per rollout: partial trajectories are saved that often, and generators do not
    run further ahead. Below 48 every so many tokens cost a new prefill. The default with generator.engine=sglang is
    1024."""
    chunk_timeout_seconds: float = Field(default=60.0, gt=0)
    """A generator that sends nothing for so long has hung: the call goes on elsewhere from the last good token."""
    max_attempts: int = Field(default=5, ge=1)
    """Leases without progress before a trajectory becomes a dead letter; leases to score a finished one after its
    worker died count on their own."""
    worker_concurrency: int = Field(default=1024, ge=1)
    """Most trajectories one rollout worker process runs at once."""
