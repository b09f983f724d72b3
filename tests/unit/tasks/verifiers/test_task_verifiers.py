"""Verifiers of generated tasks and of the user's own: ``module:function`` and ``module:Class``."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rollmesh.errors import ConfigError, VerifierError
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


OWN = '''
def short_and_right(response, metadata, limit=20):
    """1 for a right answer, half for a right one that is long."""
    right = metadata["answer"] in response
    return float(right) * (1.0 if len(response) <= limit else 0.5)

def strict(response, metadata):
    return 0
strict.timeout_means_wrong = True

async def slow(response, metadata):
    return 0

def no_metadata(response):
    return 0

class Length:
    timeout_means_wrong = False
    def __init__(self, unit=1):
        self.unit = unit
    def verify(self, response, prompt_metadata):
        return len(response) / self.unit

class Nothing:
    pass

number = 3
'''


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_verifiers_module.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "own_verifiers_module", raising=False)


def test_a_function_is_called_with_the_response_the_metadata_and_the_options() -> None:
    verifier = build_verifier("own_verifiers_module:short_and_right", {"limit": 5})
    assert verifier.verify("42", {"answer": "42"}) == 1.0
    assert verifier.verify("it is 42", {"answer": "42"}) == 0.5
    assert verifier.verify("41", {"answer": "42"}) == 0.0
    assert not verifier.timeout_means_wrong


def test_a_function_can_declare_what_its_time_out_means() -> None:
    assert build_verifier("own_verifiers_module:strict", {}).timeout_means_wrong


def test_a_class_is_made_with_the_options() -> None:
    assert build_verifier("own_verifiers_module:Length", {"unit": 2}).verify("four", {}) == 2.0


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("own_verifiers_module:missing", {}, "reward.verifier: module .* has no 'missing'"),
        ("no_such_module_y:f", {}, "reward.verifier: no module 'no_such_module_y'"),
        ("own_verifiers_module:number", {}, "must be a plain function of .response"),
        ("own_verifiers_module:slow", {}, "must be a plain function"),
        ("own_verifiers_module:no_metadata", {}, "cannot be called as f"),
        ("own_verifiers_module:strict", {"x": 1}, "cannot be called as f"),
        ("own_verifiers_module:Length", {"x": 1}, "reward.options: .* rejects"),
        ("own_verifiers_module:Nothing", {}, "needs a method verify"),
        (":f", {}, "must have the form module:name"),
    ],
)
def test_what_is_no_verifier_is_refused_by_name(target: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_verifier(target, options)


def test_an_error_inside_the_module_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "own_broken_module.py").write_text("import does_not_exist_z\n")
    with pytest.raises(ConfigError, match=r"'does_not_exist_z' \(.*own_broken_module.py:1\)"):
        build_verifier("own_broken_module:f", {})
