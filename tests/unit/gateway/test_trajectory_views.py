"""Tokens of a trajectory as runs and pages, and the rows of a batch file in their order."""

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from rollmesh.gateway.archive import BatchRow, batch_page
from rollmesh.gateway.models.items import BatchOrder, BatchTrajectory
from rollmesh.gateway.trajectory_views import token_runs, trajectory_detail
from rollmesh.types import KeptSets, Prompt, Segment, TeacherColumn, Trajectory

from ...kit.records import environment_tokens, policy_tokens


def segment(first: int, count: int, version: int, **changes: object) -> Segment:
    return policy_tokens(range(first, first + count), version, **changes)


def trajectory(*segments: Segment) -> Trajectory:
    prompt = Prompt(prompt_id="p", token_ids=np.arange(100, 103, dtype=np.int32), verifier="exact")
    return Trajectory(trajectory_id="g.0", group_id="g", member_index=0, prompt=prompt, segments=segments)


def names(ids: npt.ArrayLike) -> list[str]:
    return [f"<{i}>" for i in np.asarray(ids).tolist()]


def test_neighbours_of_one_version_are_one_run_and_a_swapped_cache_begins_another() -> None:
    said = environment_tokens([50, 51])
    whole = trajectory(segment(0, 2, 4), segment(2, 3, 4), segment(5, 1, 5, kv_min_version=4), said, segment(6, 2, 5))
    runs, following = token_runs(whole, 0, 1000, names)
    assert following is None
    assert [(r.source, r.policy_version, r.kv_min_version, r.position, len(r.token_ids)) for r in runs] == [
        ("prompt", None, None, -3, 3),
        ("policy", 4, 4, 0, 5),
        ("policy", 5, 4, 5, 1),
        ("environment", None, None, 6, 2),
        ("policy", 5, 5, 8, 2),
    ]
    assert runs[1].logprobs == [0.0, -1.0, -2.0, -3.0, -4.0]
    assert runs[1].texts == ["<0>", "<1>", "<2>", "<3>", "<4>"]
    assert runs[3].logprobs is None


def test_pages_of_any_size_together_are_the_trajectory() -> None:
    whole = trajectory(segment(0, 7, 1), segment(7, 9, 2))
    everything, _ = token_runs(whole, 0, 1000, names)
    for size in range(1, 25):
        ids: list[int] = []
        texts: list[str] = []
        at: int | None = 0
        while at is not None:
            runs, at = token_runs(whole, at, size, names)
            ids += [i for run in runs for i in run.token_ids]
            texts += [t for run in runs for t in run.texts or ()]
            assert sum(len(run.token_ids) for run in runs) <= size
        assert ids == [i for run in everything for i in run.token_ids]
        assert texts == names(ids)


def test_tokens_of_truncated_sampling_are_shown_with_the_sizes_of_their_sets_on_every_page() -> None:
    sets = KeptSets(counts=np.array([2, 1, 3], np.int32), ids=np.array([0, 9, 1, 0, 2, 9], np.int32))
    whole = trajectory(segment(0, 3, 1, kept_sets=sets), segment(3, 2, 2))
    runs, _ = token_runs(whole, 1, 6, None)
    assert [run.kept_counts for run in runs] == [None, [2, 1, 3], None]
    assert [token_runs(whole, at, 1, None)[0][0].kept_counts for at in (3, 4, 5, 6)] == [[2], [1], [3], None]


def test_a_teachers_scores_are_shown_beside_each_token_of_the_response_on_every_page() -> None:
    said = environment_tokens([50, 51])
    column = TeacherColumn(teacher="wise", manifest_digest="ab" * 32, logprobs=-np.arange(5, dtype=np.float32) / 4)
    whole = replace(trajectory(segment(0, 3, 1), said), teacher=column)
    detail = trajectory_detail(whole, 1, 4, None)
    assert detail.teacher == "wise (abababababab)"
    assert [run.teacher_logprobs for run in detail.runs] == [None, [0.0, -0.25]]
    assert [run.teacher_logprobs for run in token_runs(whole, 5, 9, None)[0]] == [[-0.5], [-0.75, -1.0]]
    plain = trajectory_detail(trajectory(said), 0, 9, None)
    assert (plain.teacher, [run.teacher_logprobs for run in plain.runs]) == ("", [None, None])


def test_a_logprob_that_is_no_number_is_null() -> None:
    odd = segment(0, 2, 1, behavior_logprobs=np.array([-math.inf, -0.1234567891], dtype=np.float32))
    runs, _ = token_runs(trajectory(odd), 0, 10, None)
    assert runs[1].logprobs == [None, -0.123457]
    assert [run.texts for run in runs] == [None, None], "without a tokenizer there are ids only"
    assert token_runs(trajectory(odd), 99, 10, names) == ([], None)


def row(name: str, reward: float | None, tokens: int) -> BatchRow:
    item = BatchTrajectory(
        id=name, group_id="e0-0", reward=reward, tokens=tokens, policy_versions=[0], finish_reason="stop", preview=""
    )
    return item, (np.arange(2, dtype=np.int32),)


ROWS = [row("a", 0.5, 3), row("unscored", None, 1), row("b", -1.0, 2), row("c", 0.5, 9)]


@pytest.mark.parametrize(
    ("order", "descending", "names"),
    [
        ("batch", True, ["c", "b", "unscored", "a"]),
        ("reward", False, ["b", "a", "c", "unscored"]),
        ("reward", True, ["a", "c", "b", "unscored"]),
        ("tokens", True, ["c", "a", "b", "unscored"]),
    ],
)
def test_rows_without_a_reward_are_last_in_both_directions(
    order: BatchOrder, descending: bool, names: list[str]
) -> None:
    page = batch_page(1, ROWS, order, descending, 0, 10, None)
    assert [item.id for item in page.items] == names
    beyond = batch_page(1, ROWS, order, descending, 50, 50, None)
    assert (beyond.items, beyond.total) == ([], 4)
