"""The policy that a generator loads next: every rule with numbers worked by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.scheduling.next_policy import NextPolicy, ReloadRules, next_policy
from rollmesh.types import PolicyRecord


def policy(version: int, train_step: int | None = None) -> PolicyRecord:
    step = version if train_step is None else train_step
    return PolicyRecord(policy_version=version, train_step=step, path=f"p{version}", manifest_digest="")


def choice(serving: int | None, newest: int | None, pinned: int | None = None, every: int = 1, **options):
    records = (None if version is None else policy(version) for version in (serving, newest, pinned))
    found = next_policy(*records, ReloadRules(every_versions=every, last_train_step=100), **options)
    return None if found is None else (found.record.policy_version, found.urgent)


@pytest.mark.parametrize(
    ("serving", "newest", "every", "expected"),
    [
        (None, None, 1, None),
        (None, 7, 4, (7, True)),
        (3, 3, 1, None),
        (3, 4, 1, (4, False)),
        (3, 9, 1, (9, False)),
        (5, 2, 1, None),
        (4, 5, 4, None),
        (4, 7, 4, None),
        (4, 8, 4, (8, False)),
        (4, 9, 4, (9, False)),
        (6, 8, 4, (8, False)),
        (9, 11, 4, None),
        (98, 99, 50, None),
        (98, 101, 50, (101, False)),
    ],
)
def test_a_newer_version_is_loaded_when_a_multiple_of_k_was_passed(serving, newest, every, expected):
    assert choice(serving, newest, every=every) == expected


def test_the_last_policy_of_the_run_is_loaded_whatever_its_version():
    rules = ReloadRules(every_versions=8, last_train_step=10)
    assert next_policy(policy(8), policy(9), None, rules) is None
    last = policy(12, train_step=10)  # after a rollback: versions run ahead of the steps
    assert next_policy(policy(8), last, None, rules) == NextPolicy(record=last, urgent=False)


def test_a_version_that_new_trajectories_may_not_start_on_is_left_without_a_turn():
    assert choice(4, 6, every=4, required_version=4) is None
    assert choice(4, 6, every=4, required_version=5) == (6, True)
    assert choice(6, 6, every=4, required_version=9) is None, "there is nothing newer to load"


def test_a_pinned_version_is_loaded_without_a_turn_also_when_it_is_older():
    assert choice(9, 9, pinned=4, every=4) == (4, True)
    assert choice(4, 9, pinned=5, every=8) == (5, True)
    assert choice(4, 9, pinned=4) is None
    assert choice(4, 9, pinned=4, required_version=9) is None, "an evaluation counts tokens of its version only"


def test_a_generator_out_of_rotation_returns_with_the_newest_version_and_with_no_older_one():
    assert choice(4, 5, every=4, in_rotation=False) == (5, True)
    assert choice(4, 4, every=4, in_rotation=False) == (4, True)
    assert choice(4, 3, in_rotation=False) is None
    assert choice(4, 9, pinned=4, in_rotation=False) == (4, True)


@given(st.integers(1, 9), st.integers(0, 40), st.lists(st.integers(0, 3), max_size=60))
def test_generators_are_never_a_whole_period_behind_and_never_below_the_required_version(every, required, looks):
    serving, newest = 0, 0
    for steps in looks:
        newest += steps
        found = choice(serving, newest, every=every, required_version=min(required, newest))
        if found is not None:
            assert found[0] == newest > serving
            serving = newest
        assert newest - serving < every
        assert serving >= min(required, newest)
