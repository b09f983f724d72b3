"""One answer inside a worker: the text that the verifier sees, and the outcome of its failures."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import tokenizers

from rollmesh.config.data import DataConfig
from rollmesh.reward.scored_answer import RewardHandler, answer_marker, timed_out
from rollmesh.tasks.sources.derived import AgentPrompts, task_of
from rollmesh.tasks.sources.source_protocol import build_prompt_source
from rollmesh.tasks.verifiers.verifier_protocol import RewardParts, build_verifier
from rollmesh.text import Tokenizer
from rollmesh.types import OutcomeKind, Prompt, RewardOutcome, SegmentSource
from rollmesh.wire.reward_messages import outcome_from_bytes, score_item_to_pb

from ...kit.answers import answer, byte_tokenizer, written

WORDS = ["<end>", "what", "is", "it", "this", "tool"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<end>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<end>"])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 8}))
    return Tokenizer(tmp_path)


class Recorder:
    """A verifier that returns what it is told to and keeps what it saw."""

    def __init__(self, result: Any = 1.0, *, timeout_means_wrong: bool = False, needs_prompt: bool = False) -> None:
        self.result = result
        self.timeout_means_wrong = timeout_means_wrong
        self.needs_prompt = needs_prompt
        self.seen: list[tuple[str, Mapping[str, Any]]] = []

    def verify(self, response: str, prompt_metadata: Mapping[str, Any]) -> float | RewardParts:
        self.seen.append((response, prompt_metadata))
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


def payload(
    metadata: Mapping[str, Any] | None = None, verifier: str = "", last: int = 0, prompt: Prompt | None = None
) -> bytes:
    ids = np.array([1, 2, 3], np.int32)
    asked = prompt or Prompt(prompt_id="p", token_ids=ids, verifier=verifier, metadata=metadata or {})
    first, tool, second = (np.array(ids, np.int32) for ids in ([3, 2], [5], [4, last]))
    heard = replace(written(tool), behavior_logprobs=None, source=SegmentSource.ENVIRONMENT)
    return score_item_to_pb(answer(asked, written(first), heard, written(second))).SerializeToString()


def handle(tokenizer: Tokenizer, verifier: Recorder, data: bytes | None = None) -> RewardOutcome:
    return outcome_from_bytes(RewardHandler(tokenizer, {"mine": verifier}, "mine")(data or payload()))


def test_the_verifier_sees_the_whole_response_without_special_tokens(tokenizer: Tokenizer) -> None:
    verifier = Recorder(0.5)
    assert handle(tokenizer, verifier) == RewardOutcome(kind=OutcomeKind.SCORED, value=0.5)
    assert verifier.seen == [("it is tool this", {})]


def test_metadata_arrives_as_the_data_set_wrote_it(tokenizer: Tokenizer) -> None:
    metadata = {"n": 3, "x": 0.5, "deep": [{"m": -7, "ok": True}, None], "text": "4", "big": 2**53}
    verifier = Recorder()
    handle(tokenizer, verifier, payload(metadata))
    seen = verifier.seen[0][1]
    assert seen == metadata
    kinds = (type(seen["n"]), type(seen["x"]), type(seen["deep"][0]["m"]), type(seen["deep"][0]["ok"]))
    assert kinds == (int, float, int, bool)


def test_the_prompt_is_added_for_a_verifier_that_asks(tokenizer: Tokenizer) -> None:
    verifier = Recorder(needs_prompt=True)
    handle(tokenizer, verifier, payload({"n": 1}))
    assert verifier.seen[0][1] == {"n": 1, "prompt": "what is it"}


@pytest.mark.parametrize("contexts", ["task", "free"])
def test_the_prompt_of_an_agent_is_the_whole_one_also_if_the_agent_writes_the_context(
    tmp_path: Path, tokenizer: Tokenizer, contexts: Literal["task", "free"]
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": [0, 1, 2, 3], "answer": "7"}))
    source = {"type": "jsonl", "path": str(tmp_path / "rows.jsonl")}
    rows = build_prompt_source(DataConfig.model_validate({"source": source}), tokenizer, 0, keep_messages=True)
    prompt = AgentPrompts(rows, tokenizer, contexts).prompt(0, 0)
    verifier = Recorder(needs_prompt=True)
    handle(tokenizer, verifier, payload(prompt=prompt))
    seen = verifier.seen[0][1]
    assert (seen["prompt"], seen["answer"]) == ("what is it", "7")
    assert task_of(prompt).metadata == {"answer": "7"}


def test_a_part_whose_name_is_no_text_is_an_error(tokenizer: Tokenizer) -> None:
    outcome = handle(tokenizer, Recorder(RewardParts(value=2.0, parts={"\ud800": 1.0})))
    assert outcome.kind is OutcomeKind.VERIFIER_ERROR
    assert "half of a surrogate pair" in outcome.message


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff\xff", "score item"),
        (payload(verifier="other"), "this run has no verifier 'other'; it has mine"),
        (payload(last=99), "token_ids[4]: id 99 is outside the vocabulary"),
    ],
)
def test_an_item_that_cannot_be_scored_is_an_error(tokenizer: Tokenizer, data: bytes, message: str) -> None:
    outcome = handle(tokenizer, Recorder(), data)
    assert outcome.kind is OutcomeKind.VERIFIER_ERROR
    assert message in outcome.message


@pytest.mark.parametrize("error", [RuntimeError("x\ud800" * 9999), KeyError("k"), SystemExit(3), RecursionError()])
def test_whatever_a_verifier_raises_is_its_own_outcome(tokenizer: Tokenizer, error: BaseException) -> None:
    outcome = handle(tokenizer, Recorder(error))
    assert outcome.kind is OutcomeKind.VERIFIER_ERROR
    assert f"mine: {type(error).__name__}" in outcome.message
    assert len(outcome.message) <= 500


def test_a_worker_out_of_memory_says_so_and_is_worn_out(tokenizer: Tokenizer) -> None:
    handler = RewardHandler(tokenizer, {"mine": Recorder(MemoryError())}, "mine")
    assert not handler.needs_replacement
    assert "MemoryError" in outcome_from_bytes(handler(payload())).message
    assert handler.needs_replacement


@pytest.mark.parametrize("means_wrong", [True, False])
def test_a_time_out_means_what_the_verifier_declares(tokenizer: Tokenizer, means_wrong: bool) -> None:
    outcome = handle(tokenizer, Recorder(TimeoutError(), timeout_means_wrong=means_wrong))
    assert outcome == timed_out("mine: the verifier's time limit expired", means_wrong)
    assert outcome.kind is (OutcomeKind.SCORED if means_wrong else OutcomeKind.TIMED_OUT)
    assert dict(outcome.parts) == ({"timed_out": 1.0} if means_wrong else {})


QUESTION = [{"role": "user", "content": "2 + 5?"}]
END = "</think>"


def make_tokenizer(folder: Path, *, special: bool = False, opens: str = "<think>\n") -> Tokenizer:
    """A tokenizer of bytes with tags of its own, whose chat template may open a thought."""
    made = byte_tokenizer()
    made.add_special_tokens(["<end>"])
    tags = ["<think>", END]
    made.add_special_tokens(tags) if special else made.add_tokens(tags)
    made.save(str(folder / "tokenizer.json"))
    asked = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]"
    opened = "{% if enable_thinking is not defined or enable_thinking %}" + opens + "{% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": asked + opened + "{% endif %}"}))
    return Tokenizer(folder)


def score(
    tokenizer: Tokenizer, name: str, response: str, reference: Any, marker: str | None = None, **options: Any
) -> float:
    """Score an answer to a chat prompt as a worker of the pool does."""
    asked = tokenizer.render_chat(QUESTION)
    prompt = Prompt(prompt_id="p", token_ids=asked, verifier="", metadata={"answer": reference})
    item = score_item_to_pb(answer(prompt, written(tokenizer.encode(response))))
    found = answer_marker(tokenizer, marker, {})
    handler = RewardHandler(tokenizer, {name: build_verifier(name, options)}, name, found)
    outcome = outcome_from_bytes(handler(item.SerializeToString()))
    assert outcome.value is not None, outcome.message
    return outcome.value


THOUGHTS = [
    ("choice", "<think>The answer is C.</think>\n\nB<end>", "B", 1.0),
    ("choice", "<think>The answer is B.</think>\n\nC", "B", 0.0),
    ("choice", "<think>The answer is B", "B", 0.0),
    ("choice", "The answer is C.</think>B", "B", 1.0),
    ("math", "<think>maybe \\boxed{5}</think> The answer is $7$.", "7", 1.0),
    ("math", "<think>So \\boxed{7}? Let me", "7", 0.0),
    ("math", "<think>\\boxed{7}</think> The answer is $5$.", "7", 0.0),
    ("math", "<think>a</think> \\boxed{5} <think>b</think> \\boxed{7}", "7", 1.0),
    ("math", "<think>a</think> \\boxed{7} <think>or \\boxed{7}", "7", 0.0),
    ("exact", "<think>Paris</think> Paris", "Paris", 1.0),
    ("exact", "<think>Paris</think>", "Paris", 0.0),
]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(("name", "response", "reference", "expected"), THOUGHTS)
def test_what_follows_the_last_thought_counts_and_nothing_in_an_open_one(
    tmp_path: Path, special: bool, name: str, response: str, reference: str, expected: float
) -> None:
    if name == "math":
        pytest.importorskip("math_verify")
    silent = make_tokenizer(tmp_path, special=special, opens="")
    assert score(silent, name, response, reference, END) == expected
    if response.startswith("<think>"):  # a model that opens its thought itself
        assert score(silent, name, response, reference) == expected
        parts = {"answer": {"verifier": name}}
        assert special or score(silent, "composite", response, reference, parts=parts) == expected
    # With a template that opens the thought the option sets itself.
    assert score(make_tokenizer(tmp_path, special=special), name, response, reference) == expected


def test_a_response_without_a_thought_is_all_answer_unless_the_template_opened_one(tmp_path: Path) -> None:
    assert score(make_tokenizer(tmp_path, opens=""), "choice", "The answer is B", "B", END) == 1.0
    assert score(make_tokenizer(tmp_path), "choice", "The answer is B", "B") == 0.0


def test_a_marker_that_is_no_tag_has_to_be_there(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, opens="")
    assert score(tokenizer, "exact", "It may be Rome.\nFinal answer: Paris", "Paris", "Final answer:") == 1.0
    assert score(tokenizer, "exact", "Paris", "Paris", "Final answer:") == 0.0


def test_the_marker_follows_the_template_its_variables_and_the_run_file(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    assert answer_marker(tokenizer, None, {}) == END
    assert answer_marker(tokenizer, None, {"enable_thinking": False}) is None
    assert answer_marker(tokenizer, "", {}) == ""
    assert score(tokenizer, "exact", "<think>a</think>", "<think>a</think>", "") == 1.0
    assert answer_marker(make_tokenizer(tmp_path, opens="[THINK]"), None, {}) == "[/THINK]"
    assert answer_marker(make_tokenizer(tmp_path, opens="<answer>"), None, {}) is None
