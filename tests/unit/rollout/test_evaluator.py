import math

import pytest

from rollmesh.rollout.evaluation.evaluator import EvaluationAnswer, summarise


def answer(reward, version=3, tokens=10, truncated=False):
    versions = (version,) if isinstance(version, int) else version
    return EvaluationAnswer(reward=reward, token_count=tokens, truncated=truncated, policy_versions=versions)


def test_mean_and_standard_error_follow_the_textbook():
    result = summarise([answer(1.0), answer(0.0), answer(1.0), answer(1.0)], 3)
    assert result.mean == 0.75
    assert result.standard_error == pytest.approx(math.sqrt((3 * 0.25**2 + 0.75**2) / 3 / 4))
    assert (result.sample_count, result.discarded_count) == (4, 0)


def test_only_answers_wholly_of_the_pinned_version_with_a_value_count():
    answers = [answer(1.0), answer(0.0, version=4), answer(0.0, version=(3, 4)), answer(None), answer(0.0, version=())]
    result = summarise(answers, 3)
    assert (result.mean, result.sample_count, result.discarded_count) == (1.0, 1, 4)


def test_lengths_and_truncation_are_those_of_the_answers_that_count():
    answers = [answer(1.0, tokens=10), answer(0.0, tokens=30, truncated=True), answer(0.0, version=9, tokens=99)]
    details = summarise(answers, 3).details
    assert details == {"mean_length": 20.0, "max_length": 30.0, "truncated_share": 0.5}


def test_no_answers_are_a_result_without_a_division_by_zero():
    result = summarise([], 3)
    assert (result.mean, result.standard_error, result.sample_count) == (0.0, None, 0)


def test_the_standard_error_of_a_single_answer_is_unknown():
    assert summarise([answer(1.0)], 3).standard_error is None
    assert summarise([answer(1.0), answer(1.0)], 3).standard_error == 0.0
