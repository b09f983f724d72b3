from rollmesh.config.services import EvalConfig
from rollmesh.store.evaluations import due_versions, evaluation_request


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
