from rollmesh.config.rollout import EvalConfig
from rollmesh.store.evaluation_requests import due_versions, evaluation_floor, evaluation_request


def test_every_kth_version_is_due_once() -> None:
    assert list(due_versions(5, 0, 4)) == []
    assert list(due_versions(5, 0, 5)) == [5]
    assert list(due_versions(5, 5, 9)) == []
    assert list(due_versions(5, 4, 17)) == [5, 10, 15]


def test_nothing_is_due_without_periodic_evaluations_or_before_the_first_version() -> None:
    assert list(due_versions(0, 0, 100)) == []
    assert list(due_versions(1, -1, -1)) == []
    assert list(due_versions(1, -5, 2)) == [1, 2]


def test_the_same_version_is_always_asked_for_in_the_same_words() -> None:
    config = EvalConfig(prompt_count=12, samples_per_prompt=2)
    assert evaluation_request(config, 7) == evaluation_request(config, 7)
    assert evaluation_request(config, 7).evaluation_id == "version-7"
    assert evaluation_request(config, 7).prompt_count == 12


def test_a_version_that_may_be_pruned_is_not_requested_again() -> None:
    def asked(every: int, newest: int, keep_last: int) -> list[int]:
        return list(due_versions(every, evaluation_floor(every, newest, keep_last), newest))

    assert asked(5, 14, 6) == [10]
    assert asked(10, 16, 6) == [], "version 10 is the seventh newest: the newest six are kept"
    assert asked(10, 15, 6) == [10]
    assert asked(10, 20, 6) == [20]
    assert asked(3, 2, 6) == []
