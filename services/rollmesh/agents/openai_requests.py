"""Request models of the API; unknown fields and unsupported values are rejected."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from rollmesh.agents.openai_messages import Closed, Message, TemplateValue, Text, Tool, is_empty, whole_characters
from rollmesh.config.section import greedy_or_resolvable
from rollmesh.types import LARGEST_REWARD
from rollmesh.worker.turns import returns_of

MOST_CHOICES = 32
MOST_ANSWERS = 128
"""Largest number of prompts in one call times the answers to each."""
MOST_STOPS = 16
MOST_TOOLS = 128
MOST_INT32 = 2**31 - 1
"""Largest token count that the generation protocol carries."""
_NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "tools": ((False,), "only chat has tools: POST /v1/chat/completions"),
    "tool_choice": (("none", False), "only chat has tools: POST /v1/chat/completions"),
    "parallel_tool_calls": ((True, False), "only chat has tools: POST /v1/chat/completions"),
    "functions": ((False,), "send them as tools"),
    "function_call": (("none", False), "send tool_choice"),
    "previous_response_id": ((), "answers are not kept; send the whole conversation"),
    "conversation": ((), "answers are not kept; send the whole conversation"),
    "background": ((False,), "the answer to a call is all that is sent"),
    "response_format": (({"type": "text"},), "ask for the format in a message"),
    "presence_penalty": ((0,), "penalties change the distribution that logprobs are over"),
    "frequency_penalty": ((0,), "penalties change the distribution that logprobs are over"),
    "bad_words": ((False,), "penalties change the distribution that logprobs are over"),
    "logit_bias": ((False,), "a bias changes the distribution that logprobs are over"),
    "modalities": ((["text"],), "only text is generated"),
    "audio": ((False,), "only text is generated"),
    "prediction": ((False,), "omit it"),
    "reasoning_effort": ((False,), "ask for it in a message"),
    "verbosity": (("medium",), "ask for it in a message"),
    "web_search_options": ((False,), "there is no web search"),
    "service_tier": (("auto", "default"), "there are no tiers"),
    "store": ((False,), "calls are recorded in sessions: POST /v1/sessions"),
    "repetition_penalty": ((1,), "penalties change the distribution that logprobs are over"),
    "min_tokens": ((0,), "omit it: an answer may end at any token"),
    "ignore_eos": ((False,), "omit it: an answer ends at the model's end token"),
    "stop_token_ids": ((False,), "send the texts that end the answer in stop"),
    "best_of": ((1,), "request n choices"),
    "skip_special_tokens": ((True,), "send return_token_ids: the text of an answer has no special tokens"),
    "spaces_between_special_tokens": ((True, False), "omit it: the text of an answer has no special tokens"),
    "include_stop_str_in_output": ((False,), "omit it: an answer ends before its stop text"),
    "use_beam_search": ((False,), "request n choices"),
    "length_penalty": ((1,), "it belongs to beam search"),
    "early_stopping": ((False,), "it belongs to beam search"),
    "detokenize": ((True,), "send return_token_ids for the ids beside the text"),
    "return_tokens_as_token_ids": ((False,), "send return_token_ids"),
    "return_hidden_states": ((False,), "only the log-probabilities of an answer are known"),
    "no_stop_trim": ((False,), "omit it: an answer ends before its stop text"),
    "echo": ((False,), "the client already has the prompt"),
    "priority": ((0,), "omit it: calls are answered as they come"),
    "prompt_logprobs": ((False,), "omit it: only the answer's log-probabilities are known"),
    "include_reasoning": ((True,), "omit it: a thought is in reasoning_content with a renderer, else in the text"),
    "separate_reasoning": (
        (False,),
        "omit it: a thought is in reasoning_content with a renderer, else in the text",
    ),
    "suffix": ((False,), "only continuation of a text is supported"),
}
"""Fields of OpenAI's API and of other servers: values without effect beside empty ones, and the remedy for others."""


def _of_sampled_token(value: Any) -> Any:
    """Reject a number of alternatives per token above 0."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        raise ValueError("only the log-probability of the sampled token is known: send 0 for it alone")
    return value


Reward = Annotated[float, Field(ge=-LARGEST_REWARD, le=LARGEST_REWARD)]
NoAlternatives = Annotated[int, Field(ge=0, le=0), BeforeValidator(_of_sampled_token)]
PromptText = Annotated[str, Field(min_length=1), AfterValidator(whole_characters)]
TokenIds = Annotated[list[int], Field(min_length=1)]
Prompts = Annotated[list[PromptText] | list[TokenIds], Field(min_length=1, max_length=MOST_ANSWERS)]
TokenCount = Annotated[int, Field(ge=1, le=MOST_INT32)]


class StreamOptions(Closed):
    """Options of a streamed answer."""

    include_usage: bool = False
    """Send the token counts in a last event."""
    include_obfuscation: bool = False
    """Ignored: events are not padded."""
    continuous_usage_stats: Literal[False] | None = None
    """Must be false: the counts are in the last event. (Not part of OpenAI's API.)"""


def no_call(call_id: str | None) -> str:
    """Return what is wrong with the result of a call that is not waiting for one."""
    return (
        f"{call_id!r} is of no call without a result in the answer before it; send one result for each call, with the "
        "call's id"
    )


Stop = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(whole_characters)]


class Sampling(Closed):
    """Sampling parameters of every call."""

    temperature: Annotated[float, Field(ge=0, le=10), AfterValidator(greedy_or_resolvable)] | None = None
    """Softmax temperature; 0 is greedy. Defaults to 1, or to the run's temperature in a session."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus mass of the tokens that top_k keeps. A session has the run's own."""
    top_k: int | None = Field(default=None, ge=-1, le=MOST_INT32)
    """Number of most likely tokens to sample from; 0 and -1 keep all. A session has the run's own. (Not part of
    OpenAI's API.)"""
    min_p: float | None = Field(default=None, ge=0, lt=1)
    """Smallest probability to sample from, as a share of the most likely token's. A session has the run's own. (Not
    part of OpenAI's API.)"""
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    """Texts that end the answer and are not part of it."""
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    """Seed of the sampling: the same seed, policy version and context give the same answer. Not supported in a session,
    which uses the run's seed."""


class SamplingRequest(Sampling):
    """Fields common to chat and completions."""

    model: Text
    """Name of the run, or ``run@version`` for one policy version."""
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    """Number of answers; 1 in a session."""
    stream: bool | None = None
    """Send the answer as server-sent events while it is sampled."""
    stream_options: StreamOptions | None = None
    """Options of a streamed answer."""
    return_token_ids: bool | None = None
    """Include the token ids of the context and the answer; those of the context are in the first event of a stream.
    (Not part of OpenAI's API.)"""
    user: str | None = None
    """Ignored."""
    metadata: dict[str, Any] | None = None
    """Ignored."""
    prompt_cache_key: str | None = None
    """Ignored."""
    safety_identifier: str | None = None
    """Ignored."""

    @model_validator(mode="before")
    @classmethod
    def _known_fields_mean_something(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {}
        for name, value in data.items():
            if name in cls.__pydantic_fields__ or name not in _NEUTRAL:
                kept[name] = value
                continue
            neutral, instead = _NEUTRAL[name]
            if not is_empty(value) and not any(
                value == other and type(value) in (type(other), int, float) for other in neutral
            ):
                raise ValueError(f"{name}: not supported; {instead}")
        return kept

    @property
    def prompt_count(self) -> int:
        """Number of prompts, each with its own answers."""
        return 1

    @property
    def needs_texts(self) -> bool:
        """True if the answer has the texts of its tokens."""
        return bool(self.stream or self.stops or self.wants_logprobs)

    @property
    def wants_logprobs(self) -> bool:
        """True if the answer has the log-probabilities of its tokens."""
        return False

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class ConversationRequest(SamplingRequest):
    """Fields common to chat and Responses."""

    tool_choice: Literal["auto", "none", "required"] | None = None
    """auto: the answer is read for calls; none: its text is left as it is. required is auto: to force a call would
    change what the policy samples, and an answer without one is the policy's mistake."""
    parallel_tool_calls: bool | None = None
    """false: the answer has its first call only; further ones that the model wrote are among its
    invalid_tool_calls."""
    chat_template_kwargs: dict[Text, TemplateValue] | None = None
    """Variables for the chat template; they take precedence over data.chat_template_kwargs of the run. (Not part of
    OpenAI's API.)"""
    top_logprobs: NoAlternatives | None = None
    """Must be 0: only the log-probability of the sampled token is known."""


class ChatRequest(ConversationRequest):
    """POST /v1/chat/completions."""

    context_field: ClassVar[str] = "messages"
    """Field of the client's request that has the conversation."""
    messages: list[Message] = Field(min_length=1)
    """The conversation so far."""
    tools: list[Tool] = Field(default_factory=list, max_length=MOST_TOOLS)
    """Tools that the model may call."""
    max_tokens: TokenCount | None = None
    """Maximum tokens of the answer; defaults to the room left after the context."""
    max_completion_tokens: TokenCount | None = None
    """Alias of max_tokens."""
    logprobs: bool | None = None
    """Send the log-probability of each token, at the sampling temperature: over the full vocabulary, in a session over
    the tokens that it was drawn from."""
    add_special_tokens: Literal[False] | None = None
    """Must be false: the chat template writes them. (Not part of OpenAI's API.)"""
    continue_final_message: bool | None = None
    """Must be true if an assistant message ends the conversation, else false. (Not part of OpenAI's API.)"""
    add_generation_prompt: bool | None = None
    """Must be false if an assistant message ends the conversation, else true. (Not part of OpenAI's API.)"""

    @model_validator(mode="after")
    def _continues_what_is_begun(self) -> "ChatRequest":
        is_begun = self.messages[-1].role == "assistant"
        for number, message in enumerate(self.messages):
            if message.prefix and not (is_begun and message is self.messages[-1]):
                raise ValueError(
                    f"messages.{number}.prefix: true, but only an assistant message at the end is continued"
                )
        for name, value in (("continue_final_message", is_begun), ("add_generation_prompt", not is_begun)):
            if getattr(self, name) not in (None, value):
                raise ValueError(
                    f"{name}: {not value}, but an assistant message at the end is always continued, and after any "
                    "other message an answer begins; omit it"
                )
        return self

    @model_validator(mode="after")
    def _results_answer_calls(self) -> "ChatRequest":
        """Match every tool message with a call of the assistant message before it, and no call with two."""
        open_calls: set[str] | None = None  # None: no assistant message with calls precedes
        for number, message in enumerate(self.messages):
            if message.role != "tool":
                open_calls = {call.id for call in message.tool_calls} or None
                if open_calls and len(open_calls) < len(message.tool_calls):
                    raise ValueError(f"messages.{number}.tool_calls: two calls have the same id")
            elif open_calls is not None or message.tool_call_id is not None:
                if message.tool_call_id not in (open_calls or ()):
                    raise ValueError(f"messages.{number}.tool_call_id: {no_call(message.tool_call_id)}")
                open_calls = (open_calls or set()) - {message.tool_call_id}
        return self

    @property
    def tool_specs(self) -> list[dict[str, Any]]:
        """Tools in OpenAI's format, without absent fields."""
        return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in self.tools]

    @property
    def token_limit(self) -> int | None:
        """Maximum tokens of the answer; None allows all the room left after the context."""
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return min(limits, default=None)

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)


class CompletionRequest(SamplingRequest):
    """POST /v1/completions."""

    context_field: ClassVar[str] = "prompt"
    """Field of the request that has the context."""
    prompt: PromptText | TokenIds | Prompts
    """Text to continue, or its token ids (used exactly as given, without tokenizing), or a list of either. The answers
    to the first prompt come first."""
    max_tokens: TokenCount | None = None
    """Maximum tokens of the answer; defaults to 16, as in OpenAI's API."""
    add_special_tokens: Literal[True] | None = None
    """Must be true; give token ids for a context without them. (Not part of OpenAI's API.)"""
    logprobs: NoAlternatives | None = None
    """0 sends the log-probability of each token; those of other tokens are not known."""

    @model_validator(mode="after")
    def _not_too_many(self) -> "CompletionRequest":
        count = self.prompt_count * (self.n or 1)
        if count > MOST_ANSWERS:
            raise ValueError(
                f"prompt: {self.prompt_count} prompts with n={self.n or 1} are {count} answers; send prompts for at "
                f"most {MOST_ANSWERS} answers in one call"
            )
        return self

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """Prompts, each a text or token ids."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return cast("list[str | list[int]]", self.prompt)

    @property
    def prompt_count(self) -> int:
        return len(self.prompts)

    @property
    def token_limit(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None


class GenerateSampling(Sampling):
    """Sampling parameters of a call with token ids."""

    max_tokens: TokenCount | None = None
    """Maximum tokens of the answer; defaults to the room left after the context."""
    stop_token_ids: list[int] | None = None
    """Ids that the client ends an answer at; they must be end tokens of the model, at all of which an answer ends."""
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    """0 or 1: the log-probability of the sampled token is always sent."""
    skip_special_tokens: bool | None = None
    """Ignored: an answer is token ids."""
    routed_experts_prompt_start: int | None = None
    """Ignored: which experts computed a token is not sent."""


class GenerateRequest(Closed):
    """POST /inference/v1/generate: token ids in and out, as the clients of renderers and verifiers call it."""

    model: Text
    """Name of the run, or ``run@version`` for one policy version."""
    token_ids: TokenIds
    """The context."""
    sampling_params: GenerateSampling = Field(default_factory=GenerateSampling)
    """Sampling parameters."""
    cache_salt: str | None = None
    """Ignored: equal beginnings are always shared."""
    priority: int | None = None
    """Ignored: calls are answered as they come."""

    def as_completion(self) -> CompletionRequest:
        """Return the call as a completion of token ids."""
        sampling = self.sampling_params
        fields = sampling.model_dump(include=set(Sampling.model_fields))
        limit = sampling.max_tokens or MOST_INT32
        return CompletionRequest(model=self.model, prompt=self.token_ids, max_tokens=limit, logprobs=0, **fields)


WantedKind = Literal["any", "training", "evaluation"]


class SessionRequest(Closed):
    """POST /v1/sessions."""

    wait_seconds: float = Field(default=30.0, ge=0, le=120)
    """Seconds to wait for a prompt while the run is paused or its pool is full."""
    parent: Annotated[str, Field(min_length=1, max_length=100)] | None = None
    """Session of the agent whose reward its sub-agent shares (trainer.algorithm.credit: shared)."""
    kind: WantedKind = "any"
    """training or evaluation: only such a session; any: one of an evaluation first."""


class RewardRequest(Closed):
    """POST /v1/sessions/{id}/reward: reward or turns or both, or error, or verify."""

    reward: Reward | None = None
    """Value of the agent's work; beside turns, what its end adds to them."""
    turns: list[Reward] | None = Field(default=None, min_length=1)
    """Rewards of the session's answers, one each and in order (trainer.algorithm.credit: turn)."""
    error: Annotated[str, Field(min_length=1, max_length=2000), AfterValidator(whole_characters)] | None = None
    """Reason for a missing value; the run's reward.on_error decides its effect."""
    verify: bool = False
    """Score the answer with the run's verifier; only for sessions with one trajectory."""
    parts: dict[Text, Reward] = Field(default_factory=dict)
    """Further numbers that are stored with the reward."""

    @model_validator(mode="after")
    def _one_word(self) -> "RewardRequest":
        valued = self.reward is not None or self.turns is not None
        if sum((valued, self.error is not None, self.verify)) != 1:
            raise ValueError(
                "reward: give exactly one of reward (a number) with or without turns, error (the reason for a missing "
                "number), verify: true"
            )
        if self.parts and not valued:
            raise ValueError("parts: allowed only together with reward")
        largest = max(self.returns(1), key=abs)
        if abs(largest) > LARGEST_REWARD:
            raise ValueError(f"turns: rewards that sum up to {largest:g}, expected at most {LARGEST_REWARD:g} in size")
        return self

    @property
    def value(self) -> float | None:
        """Reward of the whole session; None without one."""
        return None if self.reward is None and self.turns is None else self.returns(1)[0]

    def returns(self, turn_count: int) -> list[float]:
        """Return the return of every turn; without rewards by turn, of so many turns."""
        return returns_of([0.0] * turn_count if self.turns is None else self.turns, self.reward or 0.0)
