"""Requests as clients send them: what is understood, what is neutral, what is refused by name."""

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fastapi.exceptions import RequestValidationError
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from rollmesh.agents.chat_format import ChatFormats
from rollmesh.agents.openai_errors import OpenAiError, as_openai
from rollmesh.agents.openai_messages import Closed
from rollmesh.agents.openai_requests import ChatRequest, CompletionRequest, RewardRequest, SessionRequest
from rollmesh.agents.parsed_request import ParsedRequest, check_recordable, parse_request, read_model
from rollmesh.agents.unrecorded import UnrecordedCalls
from rollmesh.text import Tokenizer
from rollmesh.types import Int32Array

from ...kit.chat_tokenizers import CHATML, make_tokenizer
from ...kit.run_files import made_run

CHAT: dict[str, Any] = {"model": "trial", "messages": [{"role": "user", "content": "hello"}]}
TEXT: dict[str, Any] = {"model": "trial", "prompt": "hello"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}


def request_of(
    request: ChatRequest | CompletionRequest, config: Any, tokenizer: Tokenizer, index: int = 0
) -> ParsedRequest:
    return parse_request(request, config, ChatFormats(config, tokenizer), index)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def config(tmp_path: Path) -> Any:
    return made_run(tmp_path, rollout={"program": "agent", "temperature": 0.8})


@pytest.mark.parametrize(
    "extra",
    [
        {"tools": []}, {"tools": None}, {"tool_choice": "none"}, {"response_format": {"type": "text"}},
        {"logit_bias": {}},
        {"presence_penalty": 0}, {"frequency_penalty": 0.0}, {"parallel_tool_calls": False}, {"store": False},
        {"tool_choice": "required"},
        {"service_tier": "auto"}, {"user": "me"}, {"metadata": {"a": 1}}, {"stream": None}, {"stop": None}, {"n": 1},
        {"prompt_cache_key": "run-1"}, {"safety_identifier": "me"}, {"min_tokens": 0},
        {"repetition_penalty": 1.0}, {"ignore_eos": False}, {"stop_token_ids": []}, {"top_logprobs": 0},
        {"skip_special_tokens": True}, {"stream_options": {"include_obfuscation": False}}, {"min_p": None},
        {"stream_options": {"include_usage": None}}, {"return_token_ids": None}, {"a_field_of_another_server": None},
        {"use_beam_search": False}, {"include_stop_str_in_output": False},
        {"add_generation_prompt": True, "continue_final_message": False}, {"bad_words": []}, {"priority": 0},
        {"include_reasoning": True}, {"early_stopping": False}, {"detokenize": True}, {"no_stop_trim": False},
        {"stream_options": {"continuous_usage_stats": False}}, {"verbosity": "medium"}, {"add_special_tokens": False},
        {"documents": []}, {"extra_body": {}}, {"a_field_of_another_server": {"of": None}},
    ],
)  # fmt: skip
def test_fields_that_say_nothing_are_accepted_and_change_no_other(extra: dict[str, Any]) -> None:
    plain, said = (ChatRequest.model_validate(body).model_dump(exclude=set(extra)) for body in (CHAT, CHAT | extra))
    assert said == plain


def test_the_flags_with_which_other_servers_continue_a_begun_answer_are_accepted() -> None:
    begun = CHAT | {"messages": [*CHAT["messages"], {"role": "assistant", "content": "The"}]}
    assert ChatRequest.model_validate(begun | {"continue_final_message": True, "add_generation_prompt": False})
    with pytest.raises(ValidationError, match="add_generation_prompt: True, but an assistant message"):
        ChatRequest.model_validate(begun | {"add_generation_prompt": True})
    message = {**begun["messages"][-1], "prefix": True}
    assert ChatRequest.model_validate(begun | {"messages": [*CHAT["messages"], message]}).messages[-1].content == "The"
    with pytest.raises(ValidationError, match=r"messages\.0\.prefix: true, but only an assistant message at the end"):
        ChatRequest.model_validate(begun | {"messages": [message, *CHAT["messages"]]})
    with pytest.raises(ValidationError, match="continue_final_message: True, but"):
        ChatRequest.model_validate(CHAT | {"continue_final_message": True})


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"functions": [{}]}, "functions: not supported; send them as tools"),
        ({"presence_penalty": 0.1}, "presence_penalty: not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias: not supported"),
        ({"best_of": 2}, "best_of: not supported"),
        ({"store": True}, "store: not supported; calls are recorded in sessions"),
        ({"min_p": 1}, "less than 1"),
        ({"repetition_penalty": 1.1}, "repetition_penalty: not supported"),
        ({"skip_special_tokens": False}, "skip_special_tokens: not supported; send return_token_ids"),
        ({"top_k": -2}, "greater than or equal to -1"),
        ({"grammar": "x"}, "Extra inputs are not permitted"),
        ({"stop": ["x"] * 17}, "at most 16"),
        ({"seed": 2**63}, "less than"),
        ({"temperature": float("nan")}, "finite"),
    ],
)
def test_fields_that_would_be_ignored_are_refused(extra: dict[str, Any], words: str) -> None:
    for kind, base in ((ChatRequest, CHAT), (CompletionRequest, TEXT)):
        with pytest.raises(ValidationError, match=words):
            kind.model_validate({**base, **extra})


def test_an_assistant_message_of_the_official_client_is_understood() -> None:
    message = {
        "role": "assistant",
        "content": "hi",
        "refusal": None,
        "tool_calls": None,
        "audio": None,
        "annotations": [],
        "provider_specific_fields": {"refusal": None},
        "reasoning_details": [],
        "prefix": False,
    }
    request = ChatRequest.model_validate({**CHAT, "messages": [message]})
    assert request.messages[0].as_template() == {"role": "assistant", "content": "hi"}
    empty = {**message, "content": None}
    request = ChatRequest.model_validate({**CHAT, "messages": [empty]})
    assert request.messages[0].as_template() == {"role": "assistant", "content": ""}
    parts = [{"type": "text", "text": "he", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "llo"}]
    request = ChatRequest.model_validate({**CHAT, "messages": [{"role": "user", "content": parts, "name": "me"}]})
    assert request.messages[0].as_template() == {"role": "user", "content": "hello", "name": "me"}


def refusal(kind: type[Closed], body: dict[str, Any]) -> OpenAiError:
    """The error that the API answers to a body."""
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    return as_openai(RequestValidationError([{**e, "loc": ("body", *e["loc"])} for e in refused.value.errors()]))


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([{"role": "tool", "content": "4", "tool_call_id": "1"}], "messages.1.tool_call_id: '1' is of no call"),
        ([{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "4"}], "messages.2.tool_call_id"),
        ([{"role": "assistant", "tool_calls": [CALL]}, *[{"role": "tool", "content": "4", "tool_call_id": "1"}] * 2],
         "messages.3.tool_call_id"),
        ([{"role": "assistant", "tool_calls": [CALL, CALL]}], "messages.1.tool_calls: two calls have the same id"),
    ],
)  # fmt: skip
def test_every_result_of_a_tool_answers_one_call(messages: list[dict[str, Any]], problem: str) -> None:
    error = refusal(ChatRequest, {**CHAT, "messages": [*CHAT["messages"], *messages]})
    assert error.status == 400 and str(error).startswith(problem)


def test_only_an_assistant_calls_tools_and_a_schema_is_json() -> None:
    error = refusal(ChatRequest, {**CHAT, "messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]})
    assert (error.status, error.param) == (400, "messages.0")
    schema = {"type": "function", "function": {"name": "no name", "parameters": {}}}
    assert refusal(ChatRequest, {**CHAT, "tools": [schema]}).param == "tools.0.function.name"
    named = {"type": "function", "function": {"name": "add"}}
    assert refusal(ChatRequest, {**CHAT, "tools": [TOOL], "tool_choice": named}).param == "tool_choice"


@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [(ChatRequest, {**CHAT, "logprobs": True, "top_logprobs": 3}, "top_logprobs"),
     (CompletionRequest, {**TEXT, "logprobs": 5}, "logprobs")],
)  # fmt: skip
def test_alternatives_of_a_token_are_refused_with_the_value_to_send(
    kind: type[Closed], body: dict[str, Any], field: str
) -> None:
    error = refusal(kind, body)
    assert (error.status, error.param) == (400, field)
    assert "only the log-probability of the sampled token is known: send 0" in str(error)


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"prompt": ""}, "prompt", "at least 1 character"),
        ({"prompt": []}, "prompt", "at least 1 item"),
        ({"prompt": ["a", ""]}, "prompt.1", "at least 1 character"),
        ({"prompt": [[1], []]}, "prompt.1", "at least 1 item"),
        ({"prompt": ["a"] * 129}, "prompt", "at most 128 items"),
        ({"prompt": ["a"] * 40, "n": 4}, "prompt", "40 prompts with n=4 are 160 answers"),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_refused_by_its_place(
    change: dict[str, Any], field: str, words: str
) -> None:
    error = refusal(CompletionRequest, {**TEXT, **change})
    assert (error.param, words in str(error)) == (field, True), error


def test_the_published_schema_has_the_limits_that_the_requests_have() -> None:
    fields = CompletionRequest.model_json_schema()
    validator = Draft202012Validator(fields)
    changes: list[dict[str, Any]] = [
        {"temperature": 10}, {"temperature": 10.5}, {"seed": 2**63 - 1}, {"seed": 2**63}, {"prompt": ""},
        {"prompt": ["a"]}, {"prompt": [""]}, {"logprobs": 0}, {"logprobs": 1}, {"n": 33}, {"n": 32},
    ]  # fmt: skip
    for change in changes:
        body = {**TEXT, **change}
        try:
            CompletionRequest.model_validate(body)
            accepted = True
        except ValidationError:
            accepted = False
        assert validator.is_valid(body) == accepted, change


def test_limits_and_defaults_are_those_of_openai() -> None:
    assert ChatRequest.model_validate(CHAT).token_limit is None
    assert ChatRequest.model_validate({**CHAT, "max_tokens": 9, "max_completion_tokens": 5}).token_limit == 5
    assert CompletionRequest.model_validate(TEXT).token_limit == 16
    assert ChatRequest.model_validate({**CHAT, "stop": "x"}).stops == ("x",)
    assert CompletionRequest.model_validate({**TEXT, "logprobs": 0}).wants_logprobs


async def test_an_unrecorded_context_is_tokenized_beside_the_loop_and_refused_if_it_is_empty() -> None:
    """The page and the worker's heartbeat share the loop, and a long text takes seconds."""
    threads: list[int] = []

    def whole_ids() -> Int32Array:
        threads.append(threading.get_ident())
        return np.empty(0, np.int32)

    calls: Any = UnrecordedCalls(None, None, None, 8)  # type: ignore[arg-type]
    with pytest.raises(OpenAiError, match="the context has no tokens"):
        await calls.start(SimpleNamespace(whole_ids=whole_ids, field="prompt"))
    assert threads and threading.get_ident() not in threads


@pytest.mark.parametrize("prompts", [["hello", "world"], [[1, 2], [3]]])
def test_every_prompt_of_a_list_is_a_context_of_its_own(prompts: list[Any], config: Any, tokenizer: Tokenizer) -> None:
    request = CompletionRequest.model_validate({**TEXT, "prompt": prompts})
    assert request.prompt_count == len(prompts)
    for index, prompt in enumerate(prompts):
        alone = request_of(CompletionRequest.model_validate({**TEXT, "prompt": prompt}), config, tokenizer)
        assert request_of(request, config, tokenizer, index).whole_ids().tolist() == alone.whole_ids().tolist()


@pytest.mark.parametrize("name", ["gpt-4", "trial@", "trial@-1", "trial@1.5", "trial@latest", "", "trial@" + "9" * 30])
def test_other_models_are_not_found(name: str) -> None:
    with pytest.raises(OpenAiError) as refused:
        read_model(name, "trial")
    assert (refused.value.status, refused.value.param, refused.value.code) == (404, "model", "model_not_found")


def test_an_ask_has_the_context_and_the_parameters(tokenizer: Tokenizer, config: Any) -> None:
    ask = request_of(
        ChatRequest.model_validate({**CHAT, "temperature": 0.5, "top_p": 0.9, "seed": -1}), config, tokenizer
    )
    assert ask.context.text == tokenizer.chat_text(CHAT["messages"])
    assert ask.whole_ids().tolist() == tokenizer.render_chat(CHAT["messages"]).tolist()
    assert (ask.params.temperature, ask.params.top_p, ask.params.seed) == (0.5, 0.9, 2**63 - 1)
    assert ask.params.stop_token_ids == tokenizer.eos_token_ids
    ids = tokenizer.encode("hello").tolist()
    for top_k, used in ((None, 0), (-1, 0), (0, 0), (5, 5)):
        parsed = request_of(ChatRequest.model_validate({**CHAT, "top_k": top_k}), config, tokenizer)
        assert parsed.params.top_k == used
    by_ids = request_of(CompletionRequest.model_validate({**TEXT, "prompt": ids}), config, tokenizer)
    assert np.array_equal(by_ids.whole_ids(), ids)
    assert by_ids.context.text == "hello"
    with pytest.raises(OpenAiError, match=r"prompt\[1\]: token id -1"):
        request_of(CompletionRequest.model_validate({**TEXT, "prompt": [0, -1]}), config, tokenizer)


def test_variables_of_the_run_and_of_the_call_reach_the_chat_template(config: Any, tmp_path: Path) -> None:
    thinking = CHATML + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    tokenizer = make_tokenizer(tmp_path / "t", template=thinking)
    off, on = ({"chat_template_kwargs": {"enable_thinking": value}} for value in (False, True))
    run = config.model_copy(update={"data": config.data.model_copy(update=off)})

    def text(run: Any, **fields: Any) -> str:
        return request_of(ChatRequest.model_validate({**CHAT, **fields}), run, tokenizer).context.text

    assert text(config).endswith("assistant\n") and text(config, chat_template_kwargs=None) == text(config)
    assert text(run) == text(config, **off) == f"{text(config)}<think></think>"
    assert text(run, **on) == text(config)
    for name in ("enable_thinkin", "messages"):
        with pytest.raises(OpenAiError, match=f"chat_template_kwargs.{name}: ") as refused:
            text(config, chat_template_kwargs={name: True})
        assert (refused.value.status, refused.value.param) == (400, "chat_template_kwargs")


def test_a_message_that_the_prompt_would_not_contain_is_refused(config: Any, tmp_path: Path) -> None:
    """A template without a branch for a role; a developer is its system."""
    branches = CHATML.replace(
        "<|im_start|>{{ m.role }}", "{% if m.role in ('system', 'user') %}<|im_start|>{{ m.role }}"
    )
    tokenizer = make_tokenizer(tmp_path / "t", template=branches.replace("<|im_end|>\n", "<|im_end|>\n{% endif %}"))
    user = CHAT["messages"][0]

    def text(*messages: dict[str, Any]) -> str:
        request = ChatRequest.model_validate({**CHAT, "messages": messages})
        return request_of(request, config, tokenizer).context.text

    instruction = {"role": "developer", "content": "be brief"}
    assert text(instruction, user).startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello")
    with pytest.raises(OpenAiError, match=r"messages: message 1 \(role 'tool'\): its content would not be") as refused:
        text(user, {"role": "tool", "content": "4"}, user)
    assert (refused.value.status, refused.value.param) == (400, "messages")


def test_an_answer_that_a_call_begins_is_continued(config: Any, tokenizer: Tokenizer) -> None:
    begun = {"role": "assistant", "content": "The sum is"}
    request = ChatRequest.model_validate({**CHAT, "messages": [*CHAT["messages"], begun]})
    text = request_of(request, config, tokenizer).context.text
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nThe sum is"


def test_a_model_without_a_chat_template_says_so(config: Any, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "t", template="")
    with pytest.raises(OpenAiError, match="no chat template") as refused:
        request_of(ChatRequest.model_validate(CHAT), config, tokenizer)
    assert (refused.value.status, refused.value.param) == (400, "messages")


@pytest.mark.parametrize(
    ("extra", "field"),
    [({"temperature": 1.0}, "temperature"), ({"top_p": 0.5}, "top_p"), ({"top_k": 1}, "top_k"), ({"n": 2}, "n"),
     ({"min_p": 0.1}, "min_p"), ({"seed": 0}, "seed"), ({"model": "trial@3"}, "model")],
)  # fmt: skip
def test_a_session_samples_as_the_run_trains(extra: dict[str, Any], field: str, config: Any) -> None:
    with pytest.raises(OpenAiError) as refused:
        check_recordable(ChatRequest.model_validate({**CHAT, **extra}), config)
    assert refused.value.param == field
    with pytest.raises(OpenAiError, match="prompt: 2 prompts in a session"):
        check_recordable(CompletionRequest.model_validate({**TEXT, "prompt": ["a", "b"]}), config)
    for top_k in (0, -1):
        neutral = {"temperature": 0.8, "top_p": 1, "top_k": top_k, "min_p": 0, "n": 1}
        check_recordable(ChatRequest.model_validate({**CHAT, **neutral}), config)


def test_a_session_of_a_run_with_truncated_sampling_takes_the_run_s_own_truncation_only(config: Any) -> None:
    truncated = config.model_copy(update={"rollout": config.rollout.model_copy(update={"top_p": 0.9, "top_k": 5})})
    check_recordable(ChatRequest.model_validate({**CHAT, "top_p": 0.9, "top_k": 5}), truncated)
    for extra in ({"top_p": 1}, {"top_k": 0}, {"top_k": -1}):
        with pytest.raises(OpenAiError, match=r"the run trains at rollout\.(top_p=0\.9|top_k=5); omit it or send"):
            check_recordable(ChatRequest.model_validate({**CHAT, **extra}), truncated)


def test_a_field_that_a_client_sends_as_null_is_not_set() -> None:
    reward = RewardRequest.model_validate({"reward": 1.0, "error": None, "verify": None, "parts": None})
    assert reward == RewardRequest(reward=1.0)
    assert SessionRequest.model_validate({"wait_seconds": None}) == SessionRequest()
    with pytest.raises(ValidationError, match="messages\n  Field required"):
        ChatRequest.model_validate({**CHAT, "messages": None})


@pytest.mark.parametrize(
    "body",
    [
        {}, {"reward": 1, "verify": True}, {"reward": float("inf")}, {"error": ""}, {"score": 1},
        {"verify": True, "parts": {"x": 1}},
    ],
)  # fmt: skip
def test_a_reward_is_one_word(body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RewardRequest.model_validate(body)
    RewardRequest.model_validate({"reward": 0, "parts": {"tests": 3}})


HALF = "a\ud800b"
"""What JSON can escape and no text holds: half of a surrogate pair."""


@pytest.mark.parametrize(
    ("model", "body", "field"),
    [
        (CompletionRequest, {**TEXT, "prompt": HALF}, "prompt"),
        (ChatRequest, {**CHAT, "messages": [{"role": "user", "content": HALF}]}, "messages.0.content"),
        (ChatRequest, {**CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]}, "text"),
        (ChatRequest, {**CHAT, "stop": HALF}, "stop"),
        (ChatRequest, {**CHAT, "model": HALF}, "model"),
        (ChatRequest, {**CHAT, "chat_template_kwargs": {"style": [{"tone": HALF}]}}, "chat_template_kwargs.style"),
        (ChatRequest, {**CHAT, "chat_template_kwargs": {"style": {HALF: 1}}}, "chat_template_kwargs.style"),
        (RewardRequest, {"error": HALF}, "error"),
        (RewardRequest, {"reward": 1.0, "parts": {HALF: 1.0}}, "parts"),
    ],
)
def test_half_a_character_is_refused_by_its_field(model: type[Closed], body: dict[str, Any], field: str) -> None:
    error = refusal(model, body)
    assert error.status == 400
    assert "half of a surrogate pair" in str(error) or "unicode string" in str(error)
    assert field in (error.param or "")
    json.dumps(error.body).encode()


def test_a_variable_of_the_chat_template_that_json_cannot_carry_is_refused_by_its_field() -> None:
    error = refusal(ChatRequest, {**CHAT, "chat_template_kwargs": {"temper": [float("nan")]}})
    assert (error.status, error.param) == (400, "chat_template_kwargs.temper")


def test_a_chat_template_that_refuses_a_variable_names_both_fields(config: Any, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "t", template=CHATML + "{% if style %}{{ style + 1 }}{% endif %}")
    request = ChatRequest.model_validate({**CHAT, "chat_template_kwargs": {"style": "terse"}})
    with pytest.raises(OpenAiError, match="^messages and chat_template_kwargs: .*the chat template refuses") as refused:
        request_of(request, config, tokenizer)
    assert (refused.value.status, refused.value.param) == (400, "messages")


def test_an_error_repeats_no_more_of_a_value_than_a_line() -> None:
    with pytest.raises(ValidationError) as refused:
        CompletionRequest.model_validate({**TEXT, "temperature": "x" * 1_000_000})
    error = as_openai(RequestValidationError(refused.value.errors()))
    assert len(str(error)) < 300


def test_a_list_of_ids_longer_than_any_context_is_refused_before_it_is_read(config: Any, tokenizer: Tokenizer) -> None:
    most = config.generator.max_context_tokens
    with pytest.raises(OpenAiError) as refused:
        request_of(CompletionRequest.model_validate({**TEXT, "prompt": [10**9] * (most + 1)}), config, tokenizer)
    assert (refused.value.param, refused.value.code) == ("prompt", "context_length_exceeded")


@pytest.mark.parametrize("body", [{"reward": 1e308}, {"reward": -1e160}, {"reward": 1.0, "parts": {"style": 1e308}}])
def test_a_reward_whose_square_or_sum_may_overflow_is_refused_with_its_bound(body: dict[str, Any]) -> None:
    error = refusal(RewardRequest, body)
    assert error.param is not None and error.param.startswith(next(reversed(body)))
    assert "1000000000" in str(error)
