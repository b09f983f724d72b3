"""The audit of a run with teachers: what it counts, and every column that it must not accept."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollmesh.config.load import validate_run_config, write_run_config
from rollmesh.report.audit import audit_run
from rollmesh.report.audit_result import TeacherCheck
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.report.sentences import audit_claims
from rollmesh.teacher.teacher_model import manifest_digest
from rollmesh.types import TeacherColumn, Trajectory

from .made_checkpoints import MadeRun, rewritten

TOP_K = 3


@torch.no_grad()
def column_of(model: PreTrainedModel, digest: str, trajectory: Trajectory, temperature: float) -> TeacherColumn:
    """The column of a trajectory by plain transformers."""
    prompt, response = trajectory.prompt.token_ids, trajectory.response_ids
    ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
    logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1] / temperature
    rows = torch.log_softmax(logits, -1)
    top = rows.topk(TOP_K, -1)
    return TeacherColumn(
        teacher="wise",
        manifest_digest=digest,
        logprobs=rows.gather(-1, ids[len(prompt) :, None])[:, 0].numpy(),
        top_ids=top.indices.numpy().astype(np.int32),
        top_logprobs=top.values.numpy(),
    )


@pytest.fixture
def taught(audited: MadeRun, tmp_path: Path) -> MadeRun:
    """The audited run with a teacher: its policy of train step 2."""
    teacher = tmp_path / "teacher"
    shutil.copytree(next((audited.folder / "checkpoints" / "policies").glob("00000002-*")), teacher)
    (teacher / "manifest.json").unlink()
    before = RecordedRun(audited.folder).config
    assert before is not None
    config = before.model_dump(mode="json", exclude_unset=True)
    config["teachers"] = {"wise": {"model": str(teacher), "top_k": TOP_K}}
    config["rollout"] = {"temperature": 0.7}
    config["trainer"]["algorithm"] = {"teacher": {"reverse_kl_coefficient": 1.0, "with_reward": True}}
    write_run_config(validate_run_config(config, "taught"), audited.folder / "config.yaml")
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    digest = manifest_digest(teacher)
    audited.replace_batches(rewritten(lambda t: replace(t, teacher=column_of(model, digest, t, 0.7))))
    return audited


def checked(run: MadeRun) -> tuple[TeacherCheck, tuple[str, ...], str]:
    """The check of the teacher, the problems of the audit and its claim."""
    result = audit_run(run.folder)
    (check,) = result.teachers
    return check, result.problems, audit_claims(result)[-1]


def test_the_columns_of_plain_transformers_are_green_and_named_by_the_digest(taught: MadeRun, tmp_path: Path) -> None:
    check, problems, claim = checked(taught)
    assert problems == ()
    digest = manifest_digest(tmp_path / "teacher")
    tokens = 6 * (5 + 10 + 15 + 10)
    assert (check.manifest_digests, check.columns, check.tokens) == ((digest,), 24, tokens)
    assert (check.checked_columns, check.checked_tokens, check.over_bound) == (24, tokens, 0)
    assert check.largest_gap is not None
    assert 0 < check.largest_gap < 1e-5
    assert claim.startswith(f"teacher wise ({digest[:12]}): 24 columns, {tokens} tokens; {tokens} tokens of 24 columns")


def altered(change: Callable[[TeacherColumn], TeacherColumn | None]) -> Callable[[Trajectory], Trajectory]:
    return lambda t: replace(t, teacher=change(t.teacher) if t.teacher is not None else None)


def moved(column: TeacherColumn, by: float, *, top: bool = False) -> TeacherColumn:
    if top:
        assert column.top_logprobs is not None
        return replace(column, top_logprobs=column.top_logprobs + np.float32(by))
    logprobs = column.logprobs.copy()
    logprobs[-1] += by
    return replace(column, logprobs=logprobs)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda c: None, r"teachers\.wise: 1 trajectories have no column of it: e0-6\.0"),
        (lambda c: replace(c, teacher="other"), r"1 trajectories have no column of it: e0-6\.0"),
        (lambda c: replace(c, manifest_digest="cd" * 32), r"its columns are of 2 models \(manifest digests .*cdcdcdcd"),
        (lambda c: replace(c, logprobs=c.logprobs[1:], top_ids=None, top_logprobs=None), "1 columns have another numb"),
        (lambda c: replace(c, top_ids=None, top_logprobs=None), "1 columns have another number"),
        (lambda c: moved(c, np.nan), "or scores that are not finite: e0-6.0"),
        (lambda c: moved(c, 5e-4), r"1 log-probabilities of 24 columns are up to 0\.0005 nats from its model"),
        (lambda c: moved(c, 5e-4, top=True), r"15 log-probabilities of 24 columns are up to 0\.0005"),
    ],
)  # fmt: skip
def test_a_column_that_is_missing_or_wrong_is_red(
    taught: MadeRun, change: Callable[[TeacherColumn], TeacherColumn | None], problem: str
) -> None:
    taught.replace_batch(4, rewritten(altered(change), "e0-6.0"))
    _, problems, _ = checked(taught)
    assert len(problems) == 1
    assert re.search(problem, problems[0])


def test_without_the_models_folder_the_columns_are_counted_only(taught: MadeRun, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "teacher")
    check, problems, claim = checked(taught)
    assert (problems, check.columns, check.checked_columns, check.largest_gap) == ((), 24, 0, None)
    assert "none computed again" in claim
