import asyncio
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from rollmesh.types import ANY_VERSION, Prompt, Trajectory, VersionNeed
from rollmesh.worker.active_trajectory import ActiveTrajectory
from rollmesh.worker.generator_pool import GeneratorSlot
from rollmesh.worker.routing import AFFINITY_SLACK, Candidates, Placement, can_serve, choose_pinned

from ...kit.records import generator_record


def generator(name, version=3, *, slots=8, serving=True, running=0, waiting=0, capacity=1024, used=0):
    return generator_record(
        name,
        policy_version=version,
        running_count=running,
        waiting_count=waiting,
        slot_count=slots,
        kv_token_capacity=capacity,
        serving=serving,
        kv_tokens_used=used,
    )


def chosen(records, in_flight=None, need=None, home=None, **options):
    record = candidates(records, in_flight or {}, home).choose(need or VersionNeed(), cached=("p",), **options)
    return None if record is None else record.instance_id


def candidates(records, in_flight, home=None):
    """Candidates with these calls; the newest call with the prompt p was on ``home``."""
    found = Candidates()
    found.update({record.instance_id: record for record in records})
    if home is not None:
        found.occupy(home, cached=("p",))
        found.leave(home)
    for name, calls in in_flight.items():
        for _ in range(calls):
            found.occupy(name)
    return found


def test_a_group_stays_together_while_load_allows():
    records = [generator("home", slots=16), generator("other", slots=16)]
    assert chosen(records, {"home": 2, "other": 0}, home="home") == "home"
    assert chosen(records, {"home": 3, "other": 0}, home="home") == "other"
    assert chosen(records, {"home": 16, "other": 15}, home="home") == "other"
    assert chosen(records, {"home": 2}, VersionNeed(min_version=9), home="home") is None


def test_a_turn_goes_to_the_generator_of_its_session_and_without_one_to_that_of_its_group():
    records = [generator(name, slots=16) for name in ("own", "group", "empty")]
    found = candidates(records, {"own": 2, "group": 1}, home="group")
    found.occupy("own", cached=("t1", "p"))
    found.occupy("group", cached=("t2", "p"))
    assert found.choose(VersionNeed(), cached=("t3", "p")).instance_id == "group"
    found.leave("own")
    assert found.choose(VersionNeed(), cached=("t1", "p")).instance_id == "own"
    found.occupy("own")
    assert found.choose(VersionNeed(), cached=("t1", "p")).instance_id == "group", "its load is clearly higher"
    assert found.choose(VersionNeed(), cached=("t1",), avoided={"own"}).instance_id == "empty"


def by_tokens(records, contexts):
    """Candidates with one call for each number of context tokens."""
    found = Candidates(Placement.TOKENS)
    found.update({record.instance_id: record for record in records})
    for name, tokens in contexts.items():
        for count in tokens:
            found.occupy(name, count, cached=("p",) if name == "home" else ())
    return found


def test_by_tokens_a_prompt_stays_with_its_cache_while_that_is_hardly_fuller_and_a_slot_is_free():
    records = [generator("home", slots=2), generator("other", slots=2)]
    assert by_tokens(records, {"home": [128]}).choose(VersionNeed(), cached=("p",)).instance_id == "home"
    assert by_tokens(records, {"home": [161]}).choose(VersionNeed(), cached=("p",)).instance_id == "other"
    assert by_tokens(records, {"home": [9, 9]}).choose(VersionNeed(), cached=("p",)).instance_id == "other"


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
    home = data.draw(st.sampled_from([None, *in_flight]))
    need = VersionNeed(min_version=min_version)
    choice = candidates(records, in_flight, home).choose(need, cached=("p",))
    fitting = [r for r in records if can_serve(r, need)]
    assert (choice is None) == (not fitting)
    if choice is not None:
        emptiest = min(in_flight[r.instance_id] / r.slot_count for r in fitting)
        assert choice in fitting
        assert in_flight[choice.instance_id] / choice.slot_count <= emptiest + AFFINITY_SLACK


class CandidatesMachine(RuleBasedStateMachine):
    """The choice is always the least loaded of all generators that can serve."""

    placement = Placement.CALLS

    def __init__(self):
        super().__init__()
        self.candidates = Candidates(self.placement)
        self.records, self.calls = {}, []

    @rule(
        name=st.sampled_from("abcdef"),
        version=st.integers(0, 3),
        slots=st.integers(0, 3),
        serving=st.booleans(),
        running=st.integers(0, 3),
        capacity=st.sampled_from([0, 64, 128]),
        used=st.integers(0, 3),
    )
    def register(self, name, version, slots, serving, running, capacity, used):
        self.records[name] = generator(
            name, version, slots=slots, serving=serving, running=running, capacity=capacity, used=used
        )
        self.candidates.update(self.records)

    @rule(name=st.sampled_from("abcdef"), version=st.integers(0, 3), serving=st.booleans())
    def register_one(self, name, version, serving):
        self.records[name] = generator(name, version, serving=serving)
        self.candidates.put(self.records[name])

    @rule(name=st.sampled_from("abcdef"), alone=st.booleans())
    def deregister(self, name, alone):
        is_known = self.records.pop(name, None) is not None
        if alone and is_known:
            self.candidates.remove(name)
        else:
            self.candidates.update(self.records)

    @rule(name=st.sampled_from("abcdef"), tokens=st.integers(0, 40))
    def occupy(self, name, tokens):
        self.calls.append([name, tokens])
        self.candidates.occupy(name, tokens)

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), tokens=st.integers(0, 9))
    def grow(self, data, tokens):
        call = data.draw(st.sampled_from(self.calls))
        call[1] += tokens
        self.candidates.grow(call[0], tokens)

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def leave(self, data):
        call = self.calls.pop(data.draw(st.integers(0, len(self.calls) - 1)))
        self.candidates.leave(*call)

    @rule(
        need=st.builds(VersionNeed, min_version=st.integers(0, 4), pinned_version=st.none() | st.integers(0, 4)),
        avoided=st.sets(st.sampled_from("abcdef"), max_size=4),
    )
    def choose(self, need, avoided):
        fitting = [r for r in self.records.values() if can_serve(r, need) and r.instance_id not in avoided]
        best = min(fitting, key=self.cost, default=None)
        assert self.candidates.choose(need, avoided=avoided) is best
        counts = Counter(name for name, _ in self.calls)
        free = sum(max(0, r.slot_count - counts[r.instance_id]) for r in fitting)
        assert self.candidates.free_slots(need, avoided) == free

    def cost(self, record):
        slots = max(1, record.slot_count)
        contexts = [tokens for name, tokens in self.calls if name == record.instance_id]
        calls, reported = len(contexts) / slots, (record.running_count + record.waiting_count) / slots
        load = calls
        if self.placement is Placement.TOKENS and record.kv_token_capacity:
            load = sum(contexts) * 32 // record.kv_token_capacity
            reported = record.kv_tokens_used / record.kv_token_capacity
            load /= 32
        return load, calls, reported, record.instance_id


class CandidatesByTokensMachine(CandidatesMachine):
    """The same for caches that fill."""

    placement = Placement.TOKENS


MACHINE_SETTINGS = settings(max_examples=50, stateful_step_count=50, deadline=None)
TestCandidates = CandidatesMachine.TestCase
TestCandidates.settings = MACHINE_SETTINGS
TestCandidatesByTokens = CandidatesByTokensMachine.TestCase
TestCandidatesByTokens.settings = MACHINE_SETTINGS


@pytest.mark.parametrize(
    ("records", "current", "chosen"),
    [
        ([generator("a", 4), generator("b", 3, running=8)], "", "b"),  # before an idle one that must load the version
        ([generator("a", 3, running=5), generator("b", 3, running=1)], "", "b"),  # the least busy one
        ([generator("a", 3), generator("b", 4, running=8, serving=False)], "b", "b"),  # stays while it loads
        ([generator("a", 3)], "b", "a"),
        ([generator("a", 3, serving=False)], "", None),
    ],
)
def test_the_generator_to_pin_serves_the_version_and_is_the_least_busy_and_the_choice_stays(records, current, chosen):
    found = choose_pinned(records, 3, current=current)
    assert (found.instance_id if found else None) == chosen


def slot() -> GeneratorSlot:
    prompt = Prompt(prompt_id="p", token_ids=np.array([1], np.int32), verifier="exact")
    active = ActiveTrajectory(Trajectory(trajectory_id="e0-0.0", group_id="e0-0", member_index=0, prompt=prompt))
    return GeneratorSlot(record=generator("a"), active=active, need=ANY_VERSION, _generators=None)  # type: ignore[arg-type]


async def wait_for_a_chunk(cut_off: GeneratorSlot) -> None:
    async with asyncio.timeout(3600) as deadline:
        cut_off.set_deadline(deadline)
        await asyncio.Event().wait()


@pytest.mark.parametrize("waits", [True, False])
async def test_a_call_can_be_cut_off_while_it_waits_for_a_chunk_or_saves_one(waits: bool):
    cut_off = slot()
    if not waits:
        cut_off.abort()
    waiting = asyncio.create_task(wait_for_a_chunk(cut_off))
    await asyncio.sleep(0)
    cut_off.abort()
    async with asyncio.timeout(60):
        with pytest.raises(TimeoutError):
            await waiting
