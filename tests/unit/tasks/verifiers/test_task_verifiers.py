"""Verifiers of generated tasks: reasoning-gym and countdown."""

import json
import time
from typing import Any

import pytest

from rollmesh.errors import VerifierError
from rollmesh.tasks.countdown import CountdownVerifier
from rollmesh.tasks.reasoning_gym import entry_from_text, entry_to_text
from rollmesh.tasks.verifiers.verifier_protocol import build_verifier

# rearc compares tuples; graph_color and countdown score what is not in the answer field.
TASKS = ["chain_sum", "leg_counting", "rearc", "countdown", "word_sorting", "tower_of_hanoi", "sudoku"]


def metadata_of(task: str) -> dict[str, Any]:
    # Imported only in the process that runs these tests: it imports matplotlib.
    entry = pytest.importorskip("reasoning_gym").create_dataset(task, size=1, seed=11)[0]
    return {"task": task, "options": "{}", "entry": entry_to_text(entry)}


def gym_verifier() -> Any:
    pytest.importorskip("reasoning_gym")
    return build_verifier("reasoning_gym", {})


@pytest.mark.parametrize("task", TASKS)
def test_the_tasks_own_answer_scores_one_and_nonsense_less(task: str) -> None:
    verifier = gym_verifier()
    metadata = metadata_of(task)
    answer = entry_from_text(metadata["entry"])["answer"]
    assert verifier.verify(str(answer), metadata) == 1.0
    assert verifier.verify(f"I think... <answer> {answer} </answer>", metadata) == 1.0
    assert float(verifier.verify("nonsense", metadata)) < 0.5
    assert float(verifier.verify("", metadata)) < 0.5


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
        gym_verifier().verify("1", {**metadata_of("chain_sum"), **change})


def test_missing_metadata_is_an_error() -> None:
    with pytest.raises(VerifierError, match="metadata has no field 'task'"):
        gym_verifier().verify("1", {})


@pytest.mark.parametrize("task", ["boxnet", "game_of_life", "prime_factorization", "coin_flip"])
@pytest.mark.parametrize("answer", ["1e999", "0 x", "{}", "[[]]", '{"a": 1}', "٣", "9" * 5000])
def test_an_answer_that_the_task_cannot_read_is_wrong_and_no_error(task: str, answer: str) -> None:
    assert float(gym_verifier().verify(answer, metadata_of(task))) < 0.5


@pytest.mark.parametrize("answer", ["nan", "NaN", "-nan", "nan + nani", "nanj"])
def test_not_a_number_is_no_right_number(answer: str) -> None:
    verifier = gym_verifier()
    for task in ("complex_arithmetic", "chain_sum", "decimal_arithmetic"):
        assert float(verifier.verify(answer, metadata_of(task))) == 0.0


PUZZLE = {"numbers": [9, 8, 7, 4, 5, 6, 1], "target": 12}
MISS = "1 + 7 = 8 ~ 12 = 4 , "
HIT = "4 + 8 = 12 ~ 12 = 0 !"


def value(response: str, puzzle: dict[str, Any] = PUZZLE) -> float:
    return CountdownVerifier().verify(response, puzzle).value


@pytest.mark.parametrize("response", [HIT, MISS + HIT, MISS * 50 + HIT, f" {HIT}\n"])
def test_a_claimed_exact_final_trial_is_correct(response: str) -> None:
    reward = CountdownVerifier().verify(response, PUZZLE)
    assert reward.value == 1.0
    assert reward.parts == {"correct": 1.0, "claimed": 1.0}


def test_a_difference_counts_larger_number_first() -> None:
    puzzle = {"numbers": [3, 9, 2, 5, 1], "target": 6}
    assert value("9 - 3 = 6 ~ 6 = 0 !", puzzle) == 1.0
    assert value("3 - 9 = 6 ~ 6 = 0 !", puzzle) == 0.0


@pytest.mark.parametrize(
    ("response", "why"),
    [
        ("", "nothing written"),
        ("!", "a bare claim"),
        (MISS + "!", "a claim without a trial"),
        (HIT[:-1] + "?", "gave up on a solution"),
        (HIT[:-1], "no end mark: ran out of tokens"),
        (MISS + "1 + 7 = 8 ~ 12 = 4 !", "claims a miss"),
        ("1 + 7 = 12 ~ 12 = 0 !", "wrong sum"),
        ("6 + 6 = 12 ~ 12 = 0 !", "one digit twice"),
        ("9 + 3 = 12 ~ 12 = 0 !", "a digit that the puzzle lacks"),
        ("4 + 8 = 12 ~ 11 = 0 !", "another target"),
        ("4 + 8 = 12 ~ 12 = 1 !", "wrong difference"),
        ("4 + 7 = 11 ~ 11 = 0 !", "hits a target of its own"),
        ("4 + 8 = 12 ~ 12 = 0 ! !", "words after the claim"),
        (HIT + " , " + MISS, "goes on after the claim"),
        ("4 8 + = 12 ~ 12 = 0 !", "words in another order"),
        ("4 + 8 = 12 !", "half a trial"),
        ("1 4 + 8 = 12 ~ 12 = 0 !", "a word too many"),
        ("４ + 8 = 12 ~ 12 = 0 !", "a digit of another script"),
    ],
)
def test_anything_else_is_wrong(response: str, why: str) -> None:
    assert value(response) == 0.0, why


def test_a_false_claim_shows_in_the_parts() -> None:
    reward = CountdownVerifier().verify(MISS + "1 + 7 = 12 ~ 12 = 0 !", PUZZLE)
    assert reward.parts == {"correct": 0.0, "claimed": 1.0}
    assert CountdownVerifier().verify(MISS + "1 + 7 = 8 ~ 12 = 4 ?", PUZZLE).parts["claimed"] == 0.0


@pytest.mark.parametrize(
    "poison", ["9" * 1_000_000 + " !", "( " * 100_000, " " * 1_000_000 + HIT, "1 + " * 250_000 + HIT, "," * 1_000_000]
)
def test_poisonous_text_costs_no_time(poison: str) -> None:
    started = time.process_time()
    assert value(poison) == 0.0
    assert time.process_time() - started < 0.1


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"numbers": [1, 2]},
        {"target": 3},
        {"numbers": [], "target": 3},
        {"numbers": "12", "target": 3},
        {"numbers": [1, "2"], "target": 3},
        {"numbers": [1, 2], "target": "3"},
    ],
)
def test_metadata_without_a_puzzle_is_an_error_and_not_a_wrong_answer(metadata: dict[str, Any]) -> None:
    with pytest.raises(VerifierError, match="countdown"):
        CountdownVerifier().verify(HIT, metadata)
