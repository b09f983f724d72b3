from hypothesis import given
from hypothesis import strategies as st

from rollmesh.launcher.service_specs import plan_replicas


def test_missing_replicas_start_at_once_and_surplus_ones_leave_from_the_top_one_at_a_time() -> None:
    assert plan_replicas(3, [0], []) == ([1, 2], None)
    assert plan_replicas(1, [0, 1, 2], []) == ([], 2)
    assert plan_replicas(0, [0], []) == ([], 0)
    assert plan_replicas(1, [0, 1, 2], [2]) == ([], None)
    # An index that drains is started again only once it has gone.
    assert plan_replicas(3, [0, 1, 2], [2]) == ([], None)
    assert plan_replicas(3, [0, 1], []) == ([2], None)


@given(
    wanted=st.lists(st.integers(0, 6), min_size=1, max_size=12),
    present=st.sets(st.integers(0, 8)),
    patience=st.integers(0, 3),
)
def test_whatever_is_asked_in_turn_the_replicas_end_as_the_last_wish_says(
    wanted: list[int], present: set[int], patience: int
) -> None:
    leaving: dict[int, int] = {}
    for wish in [*wanted, *[wanted[-1]] * 60]:
        missing, surplus = plan_replicas(wish, present, leaving)
        assert not set(missing) & present
        present |= set(missing)
        if surplus is not None:
            assert not leaving and surplus == max(present)
            leaving[surplus] = patience
        leaving = {index: left - 1 for index, left in leaving.items()}
        gone = {index for index, left in leaving.items() if left < 0}
        present -= gone
        leaving = {index: left for index, left in leaving.items() if index not in gone}
    assert present == set(range(wanted[-1]))
