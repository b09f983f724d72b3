"""Trajectories while they grow: turns and their rewards, teachers' columns, and leases."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.config.rollout import RewardConfig
from rollmesh.config.teachers import TeacherConfig, teacher_of_domain
from rollmesh.errors import DataError, NoTeacherScores
from rollmesh.store.queue_types import ReleaseReason
from rollmesh.tasks.environments.environment_protocol import EnvironmentReply, checked_reply
from rollmesh.types import FinishReason, OutcomeKind, Prompt, RewardOutcome, TeacherColumn, Trajectory
from rollmesh.worker.active_trajectory import ActiveTrajectory, LetGo, Parked
from rollmesh.worker.environment_program import outcome_of
from rollmesh.worker.evaluator import EvaluationAnswer, summarise
from rollmesh.worker.trajectory_scoring import check_column, shape
from rollmesh.worker.turns import turns_of

from ...kit.records import environment_tokens, policy_tokens

STOP = 9


def policy(*ids):
    return policy_tokens(ids)


def turns_in(segments):
    return [(t.token_ids.tolist(), t.complete, t.answered) for t in turns_of(segments, (STOP,))]


def test_turns_end_at_stop_tokens_whatever_the_chunks():
    segments = [policy(1, 2), policy(3, STOP), environment_tokens([5]), policy(4), policy(STOP), policy(6)]
    assert turns_in(segments) == [([1, 2, 3, STOP], True, True), ([4, STOP], True, False), ([6], False, False)]
    # A reply without tokens leaves two turns next to each other.
    assert turns_in([policy(1, STOP, 2, STOP)]) == [([1, STOP], True, False), ([2, STOP], True, False)]
    assert turns_in([]) == []


@given(st.lists(st.sampled_from([1, 2, STOP]), max_size=20), st.data())
def test_cutting_chunks_elsewhere_changes_no_turn(ids, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    parts = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    assert turns_in([policy(*part) for part in parts]) == turns_in([policy(*ids)])


@pytest.mark.parametrize("reward", [math.nan, math.inf, 1e308, -1e160, 1.1e9])
def test_a_reward_of_an_environment_that_would_overflow_is_an_error_with_its_value(reward: float) -> None:
    outcome = outcome_of(reward)
    assert outcome is not None and outcome.kind is OutcomeKind.VERIFIER_ERROR
    assert f"reward is {reward}, expected at most 1e+09 in size" in outcome.message
    assert outcome_of(-1e9) is not None and outcome_of(-1e9).value == -1e9  # type: ignore[union-attr]


def test_a_whole_number_that_no_float_holds_is_refused_as_a_reply() -> None:
    with pytest.raises(DataError, match=r"step returned the reward 1000.*, expected at most 1e\+09"):
        checked_reply(EnvironmentReply(text="", done=True, reward=10**400))


SCORED = RewardOutcome(kind=OutcomeKind.SCORED, value=1.0)


@pytest.mark.parametrize(
    ("tokens", "buffer", "reward"), [(10, 20, 1.0), (80, 20, 1.0), (90, 20, 0.5), (100, 20, 0.0), (50, 1000, 0.5)]
)
def test_long_answers_lose_up_to_one_over_the_last_tokens_of_the_budget(tokens, buffer, reward):
    result = shape(SCORED, tokens, RewardConfig(overlong_buffer_tokens=buffer), budget=100)
    assert result.shaped_reward == pytest.approx(reward)
    assert result.outcome.value == 1.0
    assert not result.assigned


@pytest.mark.parametrize(
    ("domain", "name"), [("code", "coder"), ("sql", "coder"), ("sums", "general"), ("", "general")]
)
def test_a_prompt_has_the_teacher_that_names_its_domain_else_the_general_one(domain: str, name: str) -> None:
    teachers = {
        "general": TeacherConfig(model="a"),
        "coder": TeacherConfig(model="b", domains=("code", "sql")),
        "prover": TeacherConfig(model="c", domains=("proofs",)),
    }
    assert teacher_of_domain(teachers, domain) == name
    del teachers["general"]
    assert teacher_of_domain(teachers, domain) == (None if name == "general" else name)


def test_the_sampled_token_need_not_be_among_the_most_likely_ones() -> None:
    column = TeacherColumn(
        teacher="math",
        manifest_digest="",
        logprobs=np.array([-9.0, -0.5], np.float32),
        top_ids=np.array([[3, 1], [2, 5]], np.int32),
        top_logprobs=np.array([[-0.5, -0.5], [-0.25, -3.0]], np.float32),
    )
    check_column(column, 2, 2)
    with pytest.raises(NoTeacherScores, match=r"teachers\.math: 2 log-probabilities for a response of 3 tokens"):
        check_column(column, 3, 2)
    with pytest.raises(NoTeacherScores, match="the 2 most likely tokens, not top_k=0"):
        check_column(column, 2, 0)


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


def held(*segments):
    prompt = Prompt(prompt_id="p", token_ids=np.array([90, 91], np.int32), verifier="exact")
    return ActiveTrajectory(
        Trajectory(trajectory_id="e0-1.0", group_id="e0-1", member_index=0, prompt=prompt, segments=tuple(segments))
    )


def ids_of(segments):
    return [int(i) for s in segments for i in s.token_ids]


def test_a_resumed_trajectory_starts_with_everything_saved_and_a_restart_forgets_every_token():
    trajectory = held(policy_tokens([1, 2], version=1), policy_tokens([3], version=4))
    assert (trajectory.token_count, trajectory.saved_token_count, trajectory.newest_version) == (3, 3, 4)
    assert trajectory.context_ids().tolist() == [90, 91, 1, 2, 3]
    trajectory.restart()
    assert (trajectory.token_count, trajectory.saved_token_count, trajectory.newest_version) == (0, 0, -1)
    assert trajectory.result(FinishReason.STOP).segments == ()


@given(st.lists(st.integers(1, 5), max_size=6), st.data())
def test_unsaved_tokens_are_exactly_those_after_the_saved_count(lengths, data):
    trajectory = held()
    first = 0
    for length in lengths:
        trajectory.add(policy_tokens(range(first, first + length), version=1))
        first += length
    trajectory.saved_token_count = data.draw(st.integers(0, first))
    rest = trajectory.unsaved()
    assert ids_of(rest) == list(range(trajectory.saved_token_count, first))
    for part in rest:
        assert part.behavior_logprobs.tolist() == (-part.token_ids).tolist()


def test_the_next_token_needs_the_newest_segments_version_and_a_new_trajectory_its_floor():
    trajectory = held()
    trajectory.set_floors(start=3, call=0)
    assert trajectory.min_version == 3
    trajectory.add(policy_tokens([1], version=2))
    assert trajectory.min_version == 2
    trajectory.add(environment_tokens([5], version=0))
    assert trajectory.min_version == 2
    trajectory.set_floors(start=3, call=6)
    assert trajectory.min_version == 6


def test_parking_stops_at_the_next_step_and_a_pause_can_be_taken_back_but_not_a_drain_or_a_loss():
    trajectory = held()
    trajectory.park(ReleaseReason.PAUSED)
    with pytest.raises(Parked) as stop:
        trajectory.check()
    assert stop.value.reason is ReleaseReason.PAUSED
    trajectory.check_lost()
    trajectory.unpark()
    trajectory.check()
    trajectory.park(ReleaseReason.DRAINED)
    trajectory.unpark()
    with pytest.raises(Parked):
        trajectory.check()
    trajectory.lose("reaped")
    with pytest.raises(LetGo, match="reaped"):
        trajectory.check()


def test_tokens_that_are_not_saved_can_be_trimmed_and_saved_ones_stay():
    trajectory = held()
    trajectory.add(policy_tokens(range(5), version=1))
    trajectory.add(policy_tokens(range(5, 9), version=2))
    trajectory.trim(7)
    assert (trajectory.token_count, trajectory.newest_version) == (7, 2)
    assert ids_of(trajectory.segments) == list(range(7))
    trajectory.saved_token_count = 4
    trajectory.trim(2)
    assert (trajectory.token_count, trajectory.newest_version) == (4, 1)
    assert trajectory.unsaved() == []
    trajectory.add(policy_tokens([7, 8], version=3))
    assert ids_of(trajectory.unsaved()) == [7, 8]


def test_observers_are_notified_of_tokens_of_a_pause_and_of_a_loss():
    trajectory, told = held(), []
    trajectory.observe(lambda seen: told.append((seen.token_count, seen.wanted)))
    trajectory.add(policy_tokens([1, 2], version=1))
    trajectory.park(ReleaseReason.PAUSED)
    trajectory.unpark()
    trajectory.lose("gone")
    assert told == [(2, True), (2, False), (2, True), (2, False)]


def test_a_stop_request_ends_with_the_call_that_it_concerns():
    trajectory = held()
    trajectory.add(policy_tokens([1, 2, 3], version=1))
    trajectory.request_stop(2)
    assert (trajectory.stop_requested, trajectory.token_count) == (True, 2)
    trajectory.begin_call("b")
    assert not trajectory.stop_requested


def test_a_first_token_is_unreported_until_it_is_reported_or_saved_and_again_after_a_registration():
    trajectory = held()
    trajectory.add(environment_tokens([8], version=0))
    assert trajectory.unreported_version is None
    trajectory.add(policy_tokens([1, 2], version=4))
    assert trajectory.unreported_version == 4
    trajectory.first_token_reported = True
    assert trajectory.unreported_version is None
    trajectory.mark_registered(0)
    assert trajectory.unreported_version == 4
    trajectory.mark_registered(9)
    assert (trajectory.unreported_version, trajectory.saved_token_count) == (None, 3)
