"""Real reasoning-gym tasks, scored from what travels: the entry as text through a protobuf struct."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollmesh.errors import VerifierError
from rollmesh.tasks.reasoning_gym import entry_from_text, entry_to_text
from rollmesh.tasks.verifiers.verifier_protocol import build_verifier

# rearc compares tuples; graph_color and countdown score what is not in the answer field.
TASKS = ["chain_sum", "leg_counting", "rearc", "countdown", "word_sorting", "tower_of_hanoi", "sudoku"]


@pytest.fixture(autouse=True, scope="module")
def _reasoning_gym() -> None:
    """Import reasoning-gym only in the process that runs these tests: it imports matplotlib."""
    pytest.importorskip("reasoning_gym")


def entry_of(task: str) -> dict[str, Any]:
    import reasoning_gym

    entry: dict[str, Any] = reasoning_gym.create_dataset(task, size=1, seed=11)[0]
    return entry


def metadata_of(task: str) -> dict[str, Any]:
    return {"task": task, "options": "{}", "entry": entry_to_text(entry_of(task))}


@pytest.mark.parametrize("task", TASKS)
def test_the_tasks_own_answer_scores_one_and_nonsense_less(task: str) -> None:
    verifier = build_verifier("reasoning_gym", {})
    metadata = metadata_of(task)
    answer = entry_from_text(metadata["entry"])["answer"]
    assert verifier.verify(str(answer), metadata) == 1.0
    assert verifier.verify(f"I think... <answer> {answer} </answer>", metadata) == 1.0
    assert float(verifier.verify("nonsense", metadata)) < 0.5  # type: ignore[arg-type]
    assert float(verifier.verify("", metadata)) < 0.5  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"entry": None}, "metadata names no task: not an encoded entry"),
        ({"task": "no_such_task"}, "metadata names no task"),
        ({"options": "{"}, "metadata names no task"),
        ({"options": json.dumps({"min_termz": 1})}, "metadata names no task"),
    ],
)
def test_metadata_that_the_source_did_not_write_is_an_error(change: dict[str, Any], message: str) -> None:
    with pytest.raises(VerifierError, match=message):
        build_verifier("reasoning_gym", {}).verify("1", {**metadata_of("chain_sum"), **change})


def test_missing_metadata_is_an_error() -> None:
    with pytest.raises(VerifierError, match="metadata has no field 'task'"):
        build_verifier("reasoning_gym", {}).verify("1", {})


@pytest.mark.parametrize("task", ["boxnet", "game_of_life", "prime_factorization", "coin_flip"])
@pytest.mark.parametrize("answer", ["1e999", "0 x", "{}", "[[]]", '{"a": 1}', "٣", "9" * 5000])
def test_an_answer_that_the_task_cannot_read_is_wrong_and_no_error(task: str, answer: str) -> None:
    assert float(build_verifier("reasoning_gym", {}).verify(answer, metadata_of(task))) < 0.5  # type: ignore[arg-type]


@pytest.mark.parametrize("answer", ["nan", "NaN", "-nan", "nan + nani", "nanj"])
def test_not_a_number_is_no_right_number(answer: str) -> None:
    verifier = build_verifier("reasoning_gym", {})
    for task in ("complex_arithmetic", "chain_sum", "decimal_arithmetic"):
        assert float(verifier.verify(answer, metadata_of(task))) == 0.0  # type: ignore[arg-type]
