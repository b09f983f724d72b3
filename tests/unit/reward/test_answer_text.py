"""Answers of models that think: what their verifiers read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from rollmesh.reward.scored_answer import RewardHandler, answer_marker
from rollmesh.tasks.verifiers.verifier_protocol import build_verifier
from rollmesh.text import Tokenizer
from rollmesh.types import FinishReason, Prompt, Segment, Trajectory
from rollmesh.wire.reward_messages import outcome_from_bytes, score_item_to_pb

QUESTION = [{"role": "user", "content": "2 + 5?"}]
END = "</think>"


def make_tokenizer(folder: Path, *, special: bool = False, opens: str = "<think>\n") -> Tokenizer:
    """A tokenizer of bytes with tags of its own, whose chat template may open a thought."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    tags = ["<think>", END]
    made.add_special_tokens(tags) if special else made.add_tokens(tags)
    made.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]"
    )
    opened = "{% if enable_thinking is not defined or enable_thinking %}" + opens + "{% endif %}"
    settings = {"chat_template": template + opened + "{% endif %}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer(folder)


def score(
    tokenizer: Tokenizer, name: str, response: str, answer: Any, marker: str | None = None, **options: Any
) -> float:
    """Score an answer to a chat prompt as a worker of the pool does."""
    ids = tokenizer.encode(response)
    segment = Segment(
        token_ids=ids, behavior_logprobs=np.zeros(len(ids), np.float32), policy_version=0, kv_min_version=0
    )
    prompt = Prompt(prompt_id="p", token_ids=tokenizer.render_chat(QUESTION), verifier="", metadata={"answer": answer})
    trajectory = Trajectory(
        trajectory_id="t",
        group_id="g",
        member_index=0,
        prompt=prompt,
        segments=(segment,),
        finish_reason=FinishReason.STOP,
    )
    found = answer_marker(tokenizer, marker, {})
    handler = RewardHandler(tokenizer, {name: build_verifier(name, options)}, name, found)
    outcome = outcome_from_bytes(handler(score_item_to_pb(trajectory).SerializeToString()))
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
@pytest.mark.parametrize(("name", "response", "answer", "expected"), THOUGHTS)
def test_what_follows_the_last_thought_counts_and_nothing_in_an_open_one(
    tmp_path: Path, special: bool, name: str, response: str, answer: str, expected: float
) -> None:
    if name == "math":
        pytest.importorskip("math_verify")
    silent = make_tokenizer(tmp_path, special=special, opens="")
    assert score(silent, name, response, answer, END) == expected
    if response.startswith("<think>"):  # a model that opens its thought itself
        assert score(silent, name, response, answer) == expected
        parts = {"answer": {"verifier": name}}
        assert special or score(silent, "composite", response, answer, parts=parts) == expected
    # With a template that opens the thought the option sets itself.
    assert score(make_tokenizer(tmp_path, special=special), name, response, answer) == expected


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
