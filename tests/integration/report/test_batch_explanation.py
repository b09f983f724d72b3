import io
import json
import math
import shutil
from typing import Any

import pytest
from rich.console import Console

from rollmesh.config.teachers import TeacherObjective
from rollmesh.errors import DataError
from rollmesh.report.batch_explanation import explain_batch, explained_batch

from ...kit.checkpoint_samples import step_settings
from ...kit.made_batches import with_teacher


def printed(folder: Any, step: int, **options: Any) -> str:
    out = io.StringIO()
    explain_batch(folder, step, console=Console(file=out, width=140), **options)
    return out.getvalue()


def test_on_policy_tokens_have_a_ratio_of_one_and_those_of_the_environment_no_weight(
    audited: Any,
) -> None:
    (explained,) = explained_batch(audited.folder, 1).trajectories
    assert explained.trajectory.trajectory_id == "e0-0.0"
    assert len(explained.tokens) == 5
    assert all(token.ratio == pytest.approx(1, abs=1e-4) for token in explained.tokens)
    assert {token.policy_version for token in explained.tokens} == {0}
    assert explained.texts == tuple(f"w{token.token_id}" for token in explained.tokens)
    assert explained.response == " ".join(explained.texts)
    (explained,) = explained_batch(audited.folder, 2, trajectory_id="e0-3.0").trajectories
    environment = [token for token in explained.tokens if token.reason == "environment"]
    assert [(token.policy_version, token.weight) for token in environment] == [(None, 0.0)] * 5


def test_tokens_of_an_older_policy_carry_their_version_and_the_ratio_to_the_newest_one(audited: Any) -> None:
    (explained,) = explained_batch(audited.folder, 4, trajectory_id="e0-6.1").trajectories
    versions = [token.policy_version for token in explained.tokens]
    assert versions == [1] * 5 + [3] * 5
    assert [token.staleness for token in explained.tokens] == [2] * 5 + [0] * 5
    old = explained.tokens[:5]
    assert any(abs(token.ratio - 1) > 0.01 for token in old)
    for token in old:
        assert token.ratio == pytest.approx(math.exp(token.logprob - token.behavior_logprob), rel=1e-4)
    assert all(token.ratio == pytest.approx(1, abs=1e-4) for token in explained.tokens[5:])


def test_the_table_shows_prompt_versions_and_marks_tokens_with_a_mixed_cache(audited: Any) -> None:
    text = printed(audited.folder, 4, trajectory_id="e0-7.1")
    assert "note:" not in text, "numbers that are those of the training carry none"
    assert "e0-7.1: reward 1" in text
    assert "cache of another version" in text
    assert "3*" in text


def test_json_holds_every_token_with_its_text(audited: Any) -> None:
    data = json.loads(printed(audited.folder, 3, limit=2, as_json=True))
    assert data["train_step"] == 3
    assert [t["trajectory_id"] for t in data["trajectories"]] == ["e0-4.0", "e0-4.1"]
    token = data["trajectories"][1]["tokens"][0]
    assert {"text", "policy_version", "ratio", "weight", "reason", "staleness"} <= set(token)


@pytest.mark.parametrize(
    ("step", "options", "message"),
    [
        (9, {}, "no batch file .steps 1 to 6 have one."),
        (2, {"trajectory_id": "e0-99.0"}, "e0-99.0' is not in batch 2; it contains e0-2.0"),
    ],
)
def test_what_is_not_there_is_a_clear_error(audited: Any, step: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        explained_batch(audited.folder, step, **options)


def test_a_step_whose_weights_or_batch_file_are_gone_names_those_that_can_be_explained(audited: Any) -> None:
    shutil.rmtree(audited.folder / "checkpoints" / "policies" / "00000000-s0")
    with pytest.raises(DataError, match="Steps that can be explained: 2, 3, 4, 5, 6$"):
        explained_batch(audited.folder, 1)
    (batch,) = (audited.folder / "checkpoints" / "batches").glob("*3.pb*")
    batch.unlink()
    with pytest.raises(DataError, match=r"train step 3: no batch file \(the steps 1, 2, 4, 5, 6 have one\)"):
        explained_batch(audited.folder, 3)


def test_what_a_teacher_teaches_stands_beside_every_token(audited: Any) -> None:
    objective = TeacherObjective(reverse_kl_coefficient=2.0)
    audited.replace_batch(4, lambda batch: with_teacher(batch, 0), step_settings(teacher=objective))
    (explained,) = explained_batch(audited.folder, 4, trajectory_id="e0-6.1").trajectories
    header, *rows = printed(audited.folder, 4, trajectory_id="e0-6.1").splitlines()[3:]
    assert header.split()[:7] == ["#", "token", "version", "stale", "advantage", "teacher", "behavior"]
    for token, row in zip(explained.tokens, rows, strict=True):
        assert token.teacher_logprob is not None
        assert token.advantage == pytest.approx(2 * (token.teacher_logprob - token.behavior_logprob), abs=1e-5)
        assert row.split()[4:6] == [f"{token.advantage:.3f}", f"{token.teacher_logprob:.3f}"]


def test_old_logprobs_that_the_training_had_and_explain_has_not_are_counted_and_named(audited: Any) -> None:
    audited.change_config(
        generator={"on_new_version": "interrupt"},
        trainer={"algorithm": {"old_logprobs": "stage_end"}},
        schedule={"preset": "copris_paper"},
    )
    audited.replace_batch(4, lambda batch: batch, step_settings(old_logprobs="stage_end"))
    data = json.loads(printed(audited.folder, 4, trajectory_id="e0-6.1", as_json=True))
    tokens = data["trajectories"][0]["tokens"]
    assert [t["old_logprob_fallback"] for t in tokens] == ["stage_not_recorded"] * 5 + [""] * 5
    assert [t["old_logprob"] for t in tokens[:5]] == [t["behavior_logprob"] for t in tokens[:5]]
    assert data["old_logprobs"] == "stage_end"
    assert data["old_logprob_fallbacks"] == {"stage_not_recorded": 10, "mixed_cache": 5}
    text = printed(audited.folder, 4, trajectory_id="e0-6.1")
    for note in data["notes"]:
        assert f"note: {note}" in text
    assert "stage_not_recorded: 10 token(s)" in text and "are not kept" in text
    assert text.count(f"{tokens[0]['old_logprob']:.3f}~") >= 1, "the token itself is marked"


def test_several_minibatches_are_said_to_have_moved_the_weights_that_are_shown(audited: Any) -> None:
    audited.change_config(trainer={"minibatches": 2})
    data = json.loads(printed(audited.folder, 2, as_json=True))
    assert (data["minibatches"], len(data["notes"])) == (2, 1)
    assert "trainer.minibatches=2: every token is shown with the weights at the start of the step" in data["notes"][0]
    assert data["notes"][0] in printed(audited.folder, 2)
