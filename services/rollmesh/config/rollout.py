"""Rollout, reward and evaluation sections: program and limits of a rollout, the score of its answer, evaluations."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from rollmesh.config.section import GrpcAddress, Section, Temperature
from rollmesh.types import LARGEST_REWARD, LOWEST_TEMPERATURE, SamplingParams


class AgentConfig(Section):
    """Outside agents, which work through the agents service (rollout.program=agent)."""

    contexts: Literal["task", "free"] = "task"
    """task: a session's first call begins with the prompt of its task, which is the same for the whole group; free:
    the agent writes the whole context, and all of it up to the first answer counts as environment tokens."""
    open_on_first_call: bool = False
    """true: a call that names an unknown session opens it under this name, with the next prompt as its group; needs
    ``contexts: free``, since the agent does not see the prompt. false: only POST /v1/sessions opens one."""
    function: str | None = None
    """``module:function`` of ``async def rollout(client, row) -> reward``: the agents service runs it on every prompt,
    those of evaluations included, with an OpenAI client whose calls are recorded in its session; ``verifiers``: an
    environment server of verifiers makes the rollouts (docs/environments.md); null: agents come from outside."""
    function_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function; those of verifiers are ``address`` and ``silent_seconds``."""
    idle_timeout_seconds: float = Field(default=600.0, gt=0)
    """Time after which a session without a call expires: its prompt waits for another session, and its tokens are
    dropped and counted. An evaluation whose sessions no agent takes for this time ends without a score."""

    @model_validator(mode="after")
    def _opened_without_a_prompt(self) -> "AgentConfig":
        if self.open_on_first_call and self.contexts != "free":
            raise ValueError(
                f"open_on_first_call: true, but contexts={self.contexts}: a call that opens a session cannot begin "
                "with the prompt of its task; set rollout.agent.contexts=free"
            )
        return self


def _off_or_a_choice(top_k: int) -> int:
    if top_k == 1:
        raise ValueError("1 is greedy: the only kept token has probability 1, whatever is learned; set 0 (off) or 2")
    return max(top_k, 0)


class RolloutConfig(Section):
    """Program and limits of a rollout."""

    program: Literal["single_turn", "environment", "agent"] = "single_turn"
    """single_turn: one answer; environment: turns with ``environment``; agent: an outside agent takes prompts from
    the agents service, samples through its OpenAI-compatible API and posts rewards."""
    agent: AgentConfig = Field(default_factory=AgentConfig)
    """Settings for outside agents."""
    environment: str = "calculator"
    """Environment of multi-turn rollouts: a built-in one (docs/reference/environments.md), or ``module:Class``."""
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
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass of training rollouts, of the tokens that ``top_k`` keeps; 1 keeps all. Where top_p, top_k or min_p
    truncate, every token carries the set that it was drawn from, and training, its audit and all log-probabilities
    renormalise over this set (docs/truncated-sampling.md)."""
    top_k: Annotated[int, AfterValidator(_off_or_a_choice)] = Field(default=0, ge=-1)
    """Most likely tokens kept in training rollouts; 0 and -1 keep all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Smallest probability kept in training rollouts, as a share of the most likely token's; 0 keeps all."""
    kept_tokens: int = Field(default=1024, ge=2, le=4095)  # an SGLang server returns up to 4096 by default
    """Largest set that a token is drawn from where sampling is truncated: with ``top_k: 0``, the most likely tokens of
    what ``top_p`` and ``min_p`` keep."""
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
    most_waiting: int = Field(default=0, ge=0)
    """Most rollouts that do not count in schedule.pool_size while they wait for a tool, an environment or their agent,
    so that as many others start. Their next calls are not held back, so as many may generate beyond the pool. Workers
    report them with their heartbeats. 0: all rollouts count."""
    worker_concurrency: int = Field(default=1024, ge=1)
    """Maximum number of trajectories that one rollout worker process runs at once."""

    @property
    def truncated(self) -> bool:
        """True if training rollouts sample from a part of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def sampling(self, seed: int, stop_token_ids: tuple[int, ...]) -> SamplingParams:
        """Return the sampling parameters of training rollouts."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            kept_tokens=self.kept_tokens if self.truncated else 0,
            seed=seed,
            stop_token_ids=stop_token_ids,
        )

    @model_validator(mode="after")
    def _top_k_is_kept(self) -> "RolloutConfig":
        if self.top_k > self.kept_tokens:
            raise ValueError(
                f"top_k={self.top_k} is more than kept_tokens={self.kept_tokens}, the largest set of a token; lower "
                "rollout.top_k or raise rollout.kept_tokens"
            )
        return self


class RewardConfig(Section):
    """Scoring."""

    verifier: str = "countdown"
    """Verifier of prompts without one: a built-in one (docs/reference/verifiers.md), or ``module:function`` of your
    code."""
    address: GrpcAddress | None = None
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


class EvalConfig(Section):
    """Evaluation of one pinned version, with a separate quota; its answers are never trained on."""

    every_versions: int = Field(default=0, ge=0)
    """Interval of evaluations during the run, in policy versions; 0 evaluates only before and after. One generator
    serves the version during an evaluation, and the others load new versions. With a single generator, the staleness
    bound may delay training."""
    prompt_count: int = Field(default=256, ge=1)
    """Number of prompts of one evaluation, the same each time; an evaluation split with fewer prompts gives all of
    them, and the result says so."""
    samples_per_prompt: int = Field(default=1, ge=1)
    """Answers per prompt. The standard error is over the prompts: answers to one prompt are averaged first."""
    temperature: Temperature = 1.0
    """Softmax temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass."""
    top_k: Annotated[int, AfterValidator(lambda top_k: max(top_k, 0))] = Field(default=0, ge=-1)
    """Most likely tokens kept; 0 and -1 keep all."""
    seed: int = 20_000_000
    """Seed of the evaluation prompts and of their sampling noise (engine torch)."""
    before_and_after: bool = True
    """Evaluate the initial and the final policy on an idle mesh. Default false with rollout.program=agent."""
