"""Data, reward and rollout sections: sources of prompts, scoring, and limits of a rollout."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rollmesh.config.section import Section
from rollmesh.types import LOWEST_TEMPERATURE


class CountdownSource(Section):
    """Countdown search with digits and a target; the generated, endless demo task."""

    type: Literal["countdown"] = "countdown"
    min_numbers: int = Field(default=5, ge=2, le=9)
    """Minimum number of distinct digits in a puzzle."""
    max_numbers: int = Field(default=8, ge=2, le=9)
    """Maximum number of distinct digits in a puzzle."""


class JsonlSource(Section):
    """JSON-lines file with the prompts and the inputs of the verifier, one object per line."""

    type: Literal["jsonl"] = "jsonl"
    path: str
    """File with one JSON object per line."""
    prompt_field: str = "prompt"
    """Field with the prompt text (or a list of chat messages)."""
    answer_field: str | None = "answer"
    """Field with the reference answer, passed to the verifier as ``answer``; null without one."""
    verifier_field: str | None = None
    """Field that names the verifier per row; null uses reward.verifier for all rows."""
    chat: bool = False
    """Render prompts with the tokenizer's chat template."""


class ParquetSource(JsonlSource):
    """Parquet file with the fields of jsonl (extra: datasets)."""

    type: Literal["parquet"] = "parquet"  # type: ignore[assignment]


class ReasoningGymSource(Section):
    """A reasoning-gym task (extra: reward); scored by the task's own verifier."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    task: str
    """Name of the reasoning-gym dataset, for example ``chain_sum``."""
    size: int = Field(default=10_000, ge=1)
    """Items per epoch."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of ``reasoning_gym.create_dataset``."""
    chat: bool = False
    """Render prompts with the tokenizer's chat template."""


class PythonSource(Section):
    """A callable ``module:function`` returning a sequence of {"prompt": ..., "answer": ...} rows."""

    type: Literal["python"] = "python"
    target: str = Field(pattern=r"^[\w.]+:\w+$")
    """Callable ``module:function``, called with ``options`` as keyword arguments."""
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
    """Evaluation prompts; null uses ``source``: new prompts of a generated task, held-out rows of a table."""
    held_out_ratio: float = Field(default=0.05, ge=0, lt=1)
    """Share of a table's distinct prompts that is excluded from training without ``evaluation_source``; 0 evaluates on
    the training rows."""
    shuffle: bool = True
    """Shuffle every epoch with the run's seed."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Maximum length of a prompt; a longer one is an error that names its row."""


class RewardConfig(Section):
    """Scoring."""

    verifier: str = "countdown"
    """Verifier of prompts without one: exact, numeric, choice, math, countdown, reasoning_gym, python_code, regex,
    http_judge, composite, or ``module:function`` of your code."""
    address: str | None = Field(default=None, pattern=r"^(\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):[0-9]{1,5}$")
    """host:port of the reward services. Requests are balanced over every address of the name, so use a headless
    service; null finds the services in the run folder."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the verifier; an unknown option is an error at startup that lists the allowed ones."""
    timeout_seconds: float = Field(default=10.0, gt=0)
    """Time limit per answer; ``on_timeout`` decides the outcome of a time-out."""
    on_timeout: Literal["retry", "unscorable", "dead_letter", "fixed"] = "unscorable"
    """Outcome of a time-out. unscorable: another answer replaces this one in the group; retry: one retry, then
    unscorable; dead_letter: like unscorable, and the trajectory is kept for inspection; fixed: ``fixed_value``. It is
    never a silent 0. A verifier can declare that its time-out means a wrong answer: such an answer is scored 0 and
    marked, independent of this field."""
    on_error: Literal["retry", "unscorable", "dead_letter", "fixed"] = "unscorable"
    """Outcome of a verifier error, with the same choices."""
    fixed_value: float = 0.0
    """Reward that ``fixed`` assigns for training; the outcome kind stays recorded."""
    workers: int = Field(default=1, ge=1)
    """Verifier processes per reward service."""
    memory_limit_bytes: int = Field(default=1 << 30, ge=1 << 26)
    """Maximum growth of the address space of a verifier process over its size at startup."""
    overlong_buffer_tokens: int = Field(default=0, ge=0)
    """DAPO's soft overlong penalty: number of last tokens of the budget over which up to -1 is added; 0 is off."""


class AgentConfig(Section):
    """External agents, which work through the agents service (rollout.program=agent)."""

    contexts: Literal["task", "free"] = "task"
    """task: a session's first call begins with the prompt of its task, which is the same for the whole group; free:
    the agent writes the whole context, and all of it up to the first answer counts as environment tokens."""
    idle_timeout_seconds: float = Field(default=600.0, gt=0)
    """Time after which a session without a call expires: its prompt waits for another session, and its tokens are
    dropped and counted."""


class RolloutConfig(Section):
    """Program and limits of a rollout."""

    program: Literal["single_turn", "environment", "agent"] = "single_turn"
    """single_turn: one answer; environment: turns with ``environment``; agent: an external agent takes prompts from
    the agents service, samples through its OpenAI-compatible API and posts rewards."""
    agent: AgentConfig = Field(default_factory=AgentConfig)
    """Settings for external agents."""
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
    do not run further ahead. Below 48, every interval costs a new prefill. The default with generator.engine=sglang is
    1024."""
    chunk_timeout_seconds: float = Field(default=60.0, gt=0)
    """Time after which a generator that sends nothing counts as hung; the call continues on another generator from the
    last good token."""
    max_attempts: int = Field(default=5, ge=1)
    """Leases without progress before a trajectory becomes a dead letter; leases to score a finished trajectory after a
    crash of its worker are counted separately."""
    worker_concurrency: int = Field(default=1024, ge=1)
    """Maximum number of trajectories that one rollout worker process runs at once."""
