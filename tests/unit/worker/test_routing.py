from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from rollmesh.types import GeneratorRecord, VersionNeed
from rollmesh.worker.routing import AFFINITY_SLACK, Candidates, can_serve


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
    record = candidates(records, in_flight or {}).choose(need or VersionNeed(), **options)
    return None if record is None else record.instance_id


def candidates(records, in_flight):
    found = Candidates()
    found.update({record.instance_id: record for record in records})
    for name, calls in in_flight.items():
        for _ in range(calls):
            found.occupy(name)
    return found


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
    assert chosen(records, {"new": 7}, VersionNeed(min_version=3)) == "new"
    assert chosen(records, {}, VersionNeed(min_version=5)) is None


def test_an_evaluation_goes_to_its_pinned_version_and_nowhere_else():
    records = [generator("a", 2), generator("b", 3)]
    assert chosen(records, {"a": 8}, VersionNeed(pinned_version=2)) == "a"
    assert chosen(records, {}, VersionNeed(pinned_version=0)) is None


def test_generators_that_do_not_serve_or_are_avoided_get_no_call():
    records = [generator("draining", serving=False), generator("bad"), generator("good")]
    assert chosen(records, {"good": 8}, avoided={"bad"}) == "good"
    assert chosen(records[:2], avoided={"bad"}) is None


def test_a_group_stays_together_while_load_allows():
    records = [generator("home", slots=16), generator("other", slots=16)]
    assert chosen(records, {"home": 2, "other": 0}, preferred="home") == "home"
    assert chosen(records, {"home": 3, "other": 0}, preferred="home") == "other"
    assert chosen(records, {"home": 16, "other": 15}, preferred="home") == "other"
    assert chosen(records, {"home": 2}, VersionNeed(min_version=9), preferred="home") is None


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
    need = VersionNeed(min_version=min_version)
    choice = candidates(records, in_flight).choose(need, preferred=preferred)
    fitting = [r for r in records if can_serve(r, need)]
    assert (choice is None) == (not fitting)
    if choice is not None:
        emptiest = min(in_flight[r.instance_id] / r.slot_count for r in fitting)
        assert choice in fitting
        assert in_flight[choice.instance_id] / choice.slot_count <= emptiest + AFFINITY_SLACK


class CandidatesMachine(RuleBasedStateMachine):
    """The choice is always the least loaded of all generators that can serve."""

    def __init__(self):
        super().__init__()
        self.candidates = Candidates()
        self.records, self.calls = {}, Counter()

    @rule(
        name=st.sampled_from("abcdef"),
        version=st.integers(0, 3),
        slots=st.integers(0, 3),
        serving=st.booleans(),
        running=st.integers(0, 3),
    )
    def register(self, name, version, slots, serving, running):
        self.records[name] = generator(name, version, slots=slots, serving=serving, running=running)
        self.candidates.update(self.records)

    @rule(name=st.sampled_from("abcdef"))
    def deregister(self, name):
        self.records.pop(name, None)
        self.candidates.update(self.records)

    @rule(name=st.sampled_from("abcdef"))
    def occupy(self, name):
        self.calls[name] += 1
        self.candidates.occupy(name)

    @precondition(lambda self: self.calls.total())
    @rule(data=st.data())
    def leave(self, data):
        name = data.draw(st.sampled_from(sorted(self.calls.elements())))
        self.calls[name] -= 1
        self.candidates.leave(name)

    @rule(
        need=st.builds(VersionNeed, min_version=st.integers(0, 4), pinned_version=st.none() | st.integers(0, 4)),
        avoided=st.sets(st.sampled_from("abcdef"), max_size=4),
    )
    def choose(self, need, avoided):
        fitting = [r for r in self.records.values() if can_serve(r, need) and r.instance_id not in avoided]
        best = min(fitting, key=self.cost, default=None)
        assert self.candidates.choose(need, avoided=avoided) is best
        free = sum(max(0, r.slot_count - self.calls[r.instance_id]) for r in fitting)
        assert self.candidates.free_slots(need, avoided) == free

    def cost(self, record):
        slots = max(1, record.slot_count)
        reported = (record.running_count + record.waiting_count) / slots
        return self.calls[record.instance_id] / slots, reported, record.instance_id


TestCandidates = CandidatesMachine.TestCase
TestCandidates.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)
