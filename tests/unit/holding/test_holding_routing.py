from hypothesis import given
from hypothesis import strategies as st

from rollmesh.holding.routing import AFFINITY_SLACK, Need, able, choose_generator
from rollmesh.types import GeneratorRecord


def generator(name, version=3, *, slots=8, serving=True, running=0, waiting=0):
    return GeneratorRecord(
        instance_id=name,
        address=f"{name}:1",
        policy_version=version,
        running_count=running,
        waiting_count=waiting,
        slot_count=slots,
        kv_token_capacity=1024,
        serving=serving,
    )


def chosen(records, in_flight=None, need=None, **options):
    record = choose_generator(records, in_flight or {}, need or Need(), **options)
    return None if record is None else record.instance_id


def test_the_generator_with_the_most_free_share_of_slots_is_chosen():
    records = [generator("small", slots=4), generator("large", slots=16)]
    assert chosen(records, {"small": 1, "large": 3}) == "large"
    assert chosen(records, {"small": 1, "large": 5}) == "small"


def test_calls_of_other_workers_break_ties_only():
    records = [generator("a", running=6), generator("b", running=1)]
    assert chosen(records) == "b"
    assert chosen(records, {"b": 1}) == "a"


def test_a_generator_older_than_the_newest_segment_cannot_continue():
    records = [generator("old", 2), generator("new", 4)]
    assert chosen(records, {"new": 7}, Need(min_version=3)) == "new"
    assert chosen(records, {}, Need(min_version=5)) is None


def test_an_evaluation_goes_to_its_pinned_version_and_nowhere_else():
    records = [generator("a", 2), generator("b", 3)]
    assert chosen(records, {"a": 8}, Need(pinned_version=2)) == "a"
    assert chosen(records, {}, Need(pinned_version=0)) is None


def test_generators_out_of_rotation_or_avoided_get_nothing():
    records = [generator("draining", serving=False), generator("bad"), generator("good")]
    assert chosen(records, {"good": 8}, avoided={"bad"}) == "good"
    assert chosen(records[:2], avoided={"bad"}) is None


def test_a_group_stays_together_while_load_allows():
    records = [generator("home", slots=16), generator("other", slots=16)]
    assert chosen(records, {"home": 2, "other": 0}, preferred="home") == "home"
    assert chosen(records, {"home": 3, "other": 0}, preferred="home") == "other"
    assert chosen(records, {"home": 16, "other": 15}, preferred="home") == "other"
    assert chosen(records, {"home": 2}, Need(min_version=9), preferred="home") is None


@given(
    st.lists(
        st.builds(
            generator,
            st.uuids().map(str),
            st.integers(0, 5),
            slots=st.integers(1, 64),
            serving=st.booleans(),
            running=st.integers(0, 64),
        ),
        max_size=8,
    ),
    st.integers(0, 5),
    st.data(),
)
def test_the_choice_is_able_and_none_fitting_is_much_emptier(records, min_version, data):
    in_flight = {r.instance_id: data.draw(st.integers(0, r.slot_count)) for r in records}
    preferred = data.draw(st.sampled_from([None, *in_flight]))
    need = Need(min_version=min_version)
    choice = choose_generator(records, in_flight, need, preferred=preferred)
    fitting = [r for r in records if able(r, need)]
    assert (choice is None) == (not fitting)
    if choice is not None:
        emptiest = min(in_flight[r.instance_id] / r.slot_count for r in fitting)
        assert choice in fitting
        assert in_flight[choice.instance_id] / choice.slot_count <= emptiest + AFFINITY_SLACK
