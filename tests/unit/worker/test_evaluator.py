import math

import pytest

from rollmesh.worker.evaluator import EvaluationAnswer, summarise


def answer(reward, prompt=0, version=3, tokens=10, truncated=False, domain=""):
    versions = (version,) if isinstance(version, int) else version
    return EvaluationAnswer(
        prompt_index=prompt,
        reward=reward,
        token_count=tokens,
        truncated=truncated,
        policy_versions=versions,
        domain=domain,
    )


def test_only_answers_wholly_of_the_pinned_version_with_a_value_count():
    answers = [answer(1.0), answer(0.0, version=4), answer(0.0, version=(3, 4)), answer(None), answer(0.0, version=())]
    result = summarise(answers, 3)
    assert (result.mean, result.sample_count, result.discarded_count) == (1.0, 1, 4)


@pytest.mark.parametrize(("prompts", "samples"), [(32, 8), (16, 16)])
def test_repeated_answers_to_a_prompt_say_nothing_new_about_other_prompts(prompts, samples):
    result = summarise([answer(float(p % 2), p) for p in range(prompts) for _ in range(samples)], 3)
    assert (result.mean, result.sample_count) == (0.5, prompts * samples)
    # Half of the prompts are right in all samples: sqrt(prompts * 0.25 / (prompts - 1) / prompts), 0.090 and 0.129.
    assert result.standard_error == pytest.approx(0.5 / math.sqrt(prompts - 1))


def test_the_prompts_are_the_sample_of_mean_and_standard_error():
    # Means of the prompts: 1/2, 1, and 0 of the one answer that counts.
    rewards = [(0, 1.0), (0, 0.0), (1, 1.0), (1, 1.0), (2, 0.0), (2, None)]
    result = summarise([answer(reward, prompt) for prompt, reward in rewards], 3)
    assert (result.mean, result.sample_count, result.discarded_count) == (0.5, 5, 1)
    assert result.standard_error == pytest.approx(0.5 / math.sqrt(3))


def test_every_part_of_a_mixture_has_a_score_of_its_own():
    answers = [answer(1.0, 0, domain="math"), answer(0.0, 1, domain="math"), answer(None, 2, domain="math")]
    answers += [answer(1.0, 3, domain="code"), answer(0.0, 3, domain="code")]
    domains = summarise(answers, 3).domains
    assert domains["code"] == {"mean": 0.5, "standard_error": None, "n": 2}
    assert domains["math"] == {"mean": 0.5, "standard_error": pytest.approx(0.5), "n": 2}
    assert summarise([answer(1.0)], 3).domains == {}
