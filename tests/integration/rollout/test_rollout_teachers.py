"""A teacher's scores of every trajectory, beside its reward, and what becomes of a trajectory without them."""

import asyncio
import re
from dataclasses import replace

import numpy as np
import pytest

from rollmesh.errors import ConfigError
from rollmesh.runtime.addresses import free_port
from rollmesh.runtime.health import Waits
from rollmesh.store import EvalRequest
from rollmesh.types import OutcomeKind, Prompt, RewardOutcome
from rollmesh.wire.teacher_client import TeacherClient

from ...kit.teacher_service import DIGEST, KnownTeacher, known_logprobs, served, taught_by, taught_run
from ...kit.waiting import reached
from .scenes import members, whole_mesh
from .scripted import ScriptedGenerator, ScriptedPrompts, ScriptedReward


async def test_every_trajectory_of_a_batch_has_the_scores_of_its_teacher_asked_for_once(store, tmp_path):
    teacher = KnownTeacher()
    top_k = {"math": {"top_k": 3}}
    async with taught_by(tmp_path, {"math": teacher}, 0.5, **top_k) as teachers:
        async with whole_mesh(store, ScriptedGenerator("a"), teachers=teachers) as run:
            batch = await run.trainer.train(1)
            assert run.value("rollmesh_rollout_teacher_seconds_count") == len(members(batch))
    assert len(members(batch)) == 8
    for trajectory in members(batch):
        scores, ids = trajectory.teacher, trajectory.response_ids
        assert (scores.teacher, scores.manifest_digest) == ("math", DIGEST)
        assert np.array_equal(scores.logprobs, known_logprobs(ids, 0.5))
        assert np.array_equal(scores.top_ids, ids[:, None] + np.arange(3))
        assert np.array_equal(scores.top_logprobs, scores.logprobs[:, None] - np.arange(3, dtype=np.float32))
    assert sorted(teacher.calls) == sorted(t.trajectory_id for t in members(batch))


def first_value(column, value):
    changed = column.logprobs.copy()
    changed[:1] = value
    return replace(column, logprobs=changed)


BAD_SCORES = {
    "is_not_a_number": (lambda c: first_value(c, np.nan), "log-probabilities of response token 0 are not finite"),
    "are_too_few": (lambda c: replace(c, logprobs=c.logprobs[:-1], top_ids=c.top_ids[:-1],
                                      top_logprobs=c.top_logprobs[:-1]), "log-probabilities for a response of"),
    "have_no_likeliest_tokens": (lambda c: replace(c, top_ids=None, top_logprobs=None),
                                 "returned the 0 most likely tokens, not top_k=2"),
    "are_in_no_order": (lambda c: replace(c, top_logprobs=c.top_logprobs[:, ::-1]),
                        "not in the order of their probabilities"),
    "are_of_other_tokens": (lambda c: replace(c, top_ids=c.top_ids + 96), "is outside the vocabulary [0, 96)"),
    "are_refused": (lambda _: "33 tokens, the teacher's context has 32", "teachers.math: 33 tokens, the teacher's"),
}  # fmt: skip


class TwoDomains(ScriptedPrompts):
    def prompt(self, epoch: int, index: int) -> Prompt:
        return replace(super().prompt(epoch, index), domain=("sums", "code")[index % 2])


async def test_prompts_have_the_teacher_of_their_domain_and_the_others_the_general_one(store, tmp_path):
    services = {"general": KnownTeacher("11" * 32), "coder": KnownTeacher("22" * 32)}
    async with taught_by(tmp_path, services, coder={"domains": ["code"]}) as teachers:
        async with whole_mesh(store, ScriptedGenerator("a"), teachers=teachers, prompts=TwoDomains()) as run:
            batch = await run.trainer.train(1)
    found = {(t.prompt.domain, t.teacher.teacher, t.teacher.manifest_digest[:2]) for t in members(batch)}
    assert found == {("sums", "general", "11"), ("code", "coder", "22")}


@pytest.mark.parametrize("case", BAD_SCORES)
async def test_a_trajectory_whose_scores_are_bad_is_replaced_and_kept_where_the_run_says_so(store, tmp_path, case):
    change, message = BAD_SCORES[case]
    teacher = KnownTeacher(change=lambda name, column: change(column) if name.endswith(".0") else column)
    section = {"top_k": 2, "on_error": "dead_letter"}
    async with taught_by(tmp_path, {"math": teacher}, math=section) as teachers:
        async with whole_mesh(store, ScriptedGenerator("a"), teachers=teachers) as run:
            batch = await run.trainer.train(1)
            assert run.value("rollmesh_rollout_teacher_failures_total") == 2
    letters = await store.dead_letters.newest()
    assert sorted(letter.trajectory_id for letter in letters) == ["e0-0.0", "e0-1.0"]
    for letter in letters:
        assert letter.reason.startswith("verifier_error: teachers.math: ")
        assert message in letter.reason
    for group in batch.groups:
        assert sorted(t.member_index for t in group.trajectories) == [1, 2, 3, 4]
        assert all(t.outcome.kind is OutcomeKind.SCORED and t.teacher is not None for t in group.trajectories)


async def test_a_teacher_that_does_not_answer_in_time_makes_a_trajectory_unscorable(store, tmp_path):
    teacher = KnownTeacher(change=lambda name, column: None if name == "e0-0.0" else column)
    async with taught_by(tmp_path, {"math": teacher}, math={"timeout_seconds": 3.0}) as teachers:
        async with whole_mesh(store, ScriptedGenerator("a"), teachers=teachers) as run:
            batch = await run.trainer.train(1)
            assert run.value("rollmesh_rollout_trajectories_dropped_total", reason="unscorable") >= 1
    assert "e0-0.0" not in {t.trajectory_id for t in members(batch)}
    assert all(t.teacher is not None for t in members(batch))
    assert await store.dead_letters.newest() == []


async def test_a_model_that_changes_within_a_run_is_refused_until_the_first_one_is_back(store, tmp_path):
    teacher = KnownTeacher()
    async with taught_by(tmp_path, {"math": teacher}, math={"on_error": "dead_letter"}) as teachers:
        async with whole_mesh(store, ScriptedGenerator("a"), steps=2, teachers=teachers) as run:
            await run.trainer.train(1)
            teacher.digest = "cd" * 32
            await reached(store.dead_letters.newest)
            teacher.digest = DIGEST
            batch = await run.trainer.train(2)
    assert {t.teacher.manifest_digest for t in members(batch)} == {DIGEST}
    (reason,) = {letter.reason for letter in await store.dead_letters.newest()}
    assert "the model cdcdcdcdcdcd (manifest digest), but this run began with abababababab" in reason


async def test_the_replay_of_a_letter_whose_teacher_failed_has_scores(store, tmp_path):
    teacher = KnownTeacher(change=lambda name, column: "too long" if name == "e0-0.0" else column)
    async with taught_by(tmp_path, {"math": teacher}, math={"on_error": "dead_letter"}) as teachers:
        async with whole_mesh(store, ScriptedGenerator("a"), steps=2, teachers=teachers) as run:
            await reached(store.dead_letters.newest)
            replay = await store.dead_letters.replay("e0-0.0")
            await run.trainer.train(1)
            batch = await run.trainer.train(2)
    replayed = [t for t in members(batch) if t.group_id == replay]
    assert len(replayed) == 4
    assert all(np.array_equal(t.teacher.logprobs, known_logprobs(t.response_ids)) for t in replayed)


async def test_an_answer_without_a_reward_needs_no_scores(store, tmp_path):
    """Its teacher never answers, and it waits for the reward only."""
    teacher = KnownTeacher(change=lambda name, column: None if name.endswith(".0") else column)

    def outcome(trajectory):
        kind = OutcomeKind.TIMED_OUT if trajectory.member_index == 0 else OutcomeKind.SCORED
        return RewardOutcome(kind=kind, message="slow")

    async with taught_by(tmp_path, {"math": teacher}) as teachers:
        reward = ScriptedReward(outcome)
        async with whole_mesh(store, ScriptedGenerator("a"), reward=reward, teachers=teachers) as run:
            batch = await run.trainer.train(1)
    assert {t.member_index for t in members(batch)} == {1, 2, 3, 4}


async def test_a_teacher_that_is_away_is_waited_for_and_nothing_is_lost(store, tmp_path):
    port = free_port()
    config = taught_run(tmp_path, {"math": {"address": f"127.0.0.1:{port}", "timeout_seconds": 0.5}})
    waits, teacher = Waits(), KnownTeacher()
    async with TeacherClient(config, "math", waits=waits) as client:
        async with whole_mesh(store, ScriptedGenerator("a"), teachers={"math": client}) as run:
            await reached(lambda: waits.text().startswith("teachers.math service: UNAVAILABLE"))
            async with served(teacher, port):
                batch = await run.trainer.train(1)
            assert run.value("rollmesh_rollout_teacher_failures_total") == 0
    assert sorted(t.trajectory_id for t in members(batch)) == [f"e0-{g}.{m}" for g in range(2) for m in range(4)]
    assert waits.text() == ""


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"vocabulary": "ef" * 32}, "another tokenizer than that of model.path=recipe:countdown"),
        ({"context": 2047}, "its context has 2047 tokens, fewer than generator.max_context_tokens=2048; lower that"),
    ],
)
async def test_a_service_at_an_address_that_does_not_fit_the_run_ends_its_workers(store, tmp_path, other, message):
    async with taught_by(tmp_path, {"math": KnownTeacher(**other)}) as teachers:
        with pytest.raises(ConfigError, match=r"teachers\.math\.address=127\.0\.0\.1:.*" + re.escape(message)):
            async with whole_mesh(store, ScriptedGenerator("a"), teachers=teachers) as run:
                await asyncio.wait_for(run.task, 60)


async def test_answers_of_an_evaluation_have_no_teacher(store, tmp_path):
    teacher = KnownTeacher()
    async with taught_by(tmp_path, {"math": teacher}) as teachers:
        async with whole_mesh(store, ScriptedGenerator("a"), teachers=teachers) as run:
            await store.evaluations.request(EvalRequest(evaluation_id="e", policy_version=0, prompt_count=3))
            found = await reached(lambda: result_of(store))
            batch = await run.trainer.train(1)
    assert found.sample_count == 3
    assert sorted(teacher.calls) == sorted(t.trajectory_id for t in members(batch))


async def result_of(store):
    (record,) = await store.evaluations.all()
    return record.result
