"""Prompts of real reasoning-gym tasks."""

from typing import Any

import pytest

from rollmesh.config.data import DataConfig
from rollmesh.errors import ConfigError, DataError
from rollmesh.tasks.reasoning_gym import entry_from_text, entry_to_text
from rollmesh.tasks.sources.source_protocol import PromptSource, Split, build_prompt_source
from rollmesh.text import Tokenizer


@pytest.fixture(autouse=True, scope="module")
def _reasoning_gym() -> None:
    """Import reasoning-gym only in the process that runs these tests: it imports matplotlib."""
    pytest.importorskip("reasoning_gym")


def open_task(
    tokenizer: Tokenizer, task: str = "chain_sum", *, split: Split = "train", seed: int = 1, **settings: Any
) -> PromptSource:
    source = {"type": "reasoning_gym", "task": task, "size": 20, **settings.pop("source", {})}
    return build_prompt_source(DataConfig.model_validate({"source": source, **settings}), tokenizer, seed, split)


def test_an_item_becomes_a_prompt_with_its_whole_entry(tokenizer: Tokenizer) -> None:
    prompt = open_task(tokenizer).prompt(0, 0)
    entry = entry_from_text(prompt.metadata["entry"])
    assert tokenizer.decode(prompt.token_ids) == entry["question"]
    assert prompt.verifier == "reasoning_gym"
    assert prompt.metadata["task"] == "chain_sum"


def test_positions_are_stable_and_epochs_are_reordered(tokenizer: Tokenizer) -> None:
    first, again = (open_task(tokenizer) for _ in range(2))
    ids = [[s.prompt(e, i).token_ids.tolist() for i in range(20)] for s in (first, again) for e in (0, 1)]
    assert ids[:2] == ids[2:]
    assert ids[0] != ids[1]
    assert sorted(ids[0]) == sorted(ids[1])


def test_evaluation_items_are_generated_from_other_seeds(tokenizer: Tokenizer) -> None:
    train, evaluation = open_task(tokenizer), open_task(tokenizer, split="eval")
    questions = [{tokenizer.decode(s.prompt(0, i).token_ids) for i in range(20)} for s in (train, evaluation)]
    assert not questions[0] & questions[1]


def test_options_reach_the_task(tokenizer: Tokenizer) -> None:
    options = {"min_terms": 6, "max_terms": 6}
    prompt = open_task(tokenizer, source={"options": options}).prompt(0, 0)
    assert entry_from_text(prompt.metadata["entry"])["question"].count("+") + prompt.metadata["entry"].count(" - ") >= 3
    assert prompt.metadata["options"] == '{"max_terms": 6, "min_terms": 6}'


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("chain_summ", {}, "reasoning-gym has no task 'chain_summ'; for example .*chain_sum"),
        ("chain_sum", {"min_termz": 1}, "data.source.options: chain_sum rejects"),
        ("chain_sum", {"min_terms": 9, "max_terms": 2}, "data.source.options: chain_sum rejects"),
    ],
)
def test_a_wrong_task_or_option_is_named(
    tokenizer: Tokenizer, task: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_task(tokenizer, task, source={"options": options})


def test_a_question_that_is_too_long_names_its_item(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"reasoning_gym chain_sum:\d+: .* more than data.max_prompt_tokens=8"):
        open_task(tokenizer, max_prompt_tokens=8).prompt(0, 0)


def test_entries_keep_tuples_sets_and_keys_that_are_not_text() -> None:
    entry = {"a": (1, [2.5, (3,)]), "b": {1: "x", (2, 3): None}, "c": {4, 5}, "d": {"$type": "mine"}, "e": True}
    assert entry_from_text(entry_to_text(entry)) == entry


def test_an_entry_that_is_no_entry_is_a_data_error() -> None:
    with pytest.raises(DataError, match="type object has no JSON form"):
        entry_to_text({"a": object()})
    for text in ("{", "[]", '{"$type": "what"}', '{"$type": "tuple"}'):
        with pytest.raises(DataError, match="not an encoded entry"):
            entry_from_text(text)
