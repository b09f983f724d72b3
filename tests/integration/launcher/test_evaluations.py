"""Evaluations beside a run, and their journal."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.sealing import run_secret
from rollmesh.cli.main import app
from rollmesh.config import RunConfig, write_run_config
from rollmesh.config.recipes import resolve_model
from rollmesh.launcher.evaluation_journal import EvaluationJournal
from rollmesh.launcher.evaluations import source_of
from rollmesh.launcher.redis import running_store
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.report.recorded_run import read_json_lines
from rollmesh.scheduling import run_limits
from rollmesh.store import TrajectoryStore
from rollmesh.store.evaluation_requests import evaluation_request
from rollmesh.store.queue_types import EXISTING_PROMPTS, REQUESTED_PROMPTS, EvalResult

from ...kit.checkpoint_samples import copy_of, publish
from .test_launcher_outages import announce, config

VALUES = {
    "name": "small",
    "model": {"path": "recipe:countdown"},
    "data": {"source": {"type": "jsonl", "path": "rows.jsonl", "prompt_field": "question", "answer_field": "solution"}},
}


def made(folder: Path, **values: object) -> RunConfig:
    config = RunConfig.model_validate({**VALUES, "folder": str(folder), **values})
    write_run_config(config, folder / "config.yaml")
    return config


def test_a_file_of_prompts_has_the_fields_of_the_runs_own_table(tmp_path: Path) -> None:
    source = source_of(made(tmp_path), tmp_path / "hard.parquet")
    assert (source["type"], source["path"]) == ("parquet", str(tmp_path / "hard.parquet"))
    assert (source["prompt_field"], source["answer_field"]) == ("question", "solution")
    generated = made(tmp_path, data={})
    assert source_of(generated, Path("/rows.jsonl")) == {"type": "jsonl", "path": "/rows.jsonl"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with one published policy, and neither services nor a queue."""
    made(tmp_path)
    store = CheckpointStore(tmp_path / "checkpoints", run_secret(tmp_path))
    store.mark_announced(publish(store, 0, write=copy_of(resolve_model("recipe:countdown"))))
    return tmp_path


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--set", "evaluation.prompt_count=none"], "evaluation.prompt_count"),
        (["--set", "evaluation.nosuch=1"], "evaluation.nosuch"),
        (["--set", "data.evaluation_source={type: jsonl, path: absent.jsonl}"], "absent.jsonl"),
        (["--set", "rollout.program=agent"], "rollout.agent.function"),
        (["--set", "evaluation.seed=1", "--version", "3"], "--version 3: not in the checkpoints, which keep"),
        (["--data", "{other}"], "question"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_and_leaves_nothing(run: Path, options: list[str], named: str) -> None:
    other = run / "other.jsonl"
    other.write_text('{"prompt": "1 2 3 6 :"}\n')
    refused = CliRunner().invoke(
        app, ["eval", str(run), *(option.format(other=other) if "{other}" in option else option for option in options)]
    )
    assert refused.exit_code == 2, refused.output
    assert named in refused.stderr
    assert not list(run.glob("evaluation-*"))


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[TrajectoryStore]:
    run = config(tmp_path)
    async with running_store(run, RunFolder(tmp_path)) as running:
        await running.store.limits.init_run(run_limits(run))
        yield running.store


async def evaluate(
    store: TrajectoryStore, tmp_path: Path, version: int, mean: float, n: int = 256, **changes: Any
) -> None:
    await store.evaluations.request(evaluation_request(config(tmp_path).evaluation, version))
    session = await store.sessions.open("worker")
    request = await store.evaluations.claim(session)
    assert request is not None and request.policy_version == version
    domains = {"math": {"mean": mean, "standard_error": None, "n": n}} if version else {}
    given = {"standard_error": 0.02, "discarded_count": 256 - n, "details": {"mean_length": 31.5}, "domains": domains}
    result = EvalResult(mean=mean, sample_count=n, **given | changes)
    await store.evaluations.finish(session, request.evaluation_id, result)


def means(folder: RunFolder) -> dict[int, float]:
    return {line["policy_version"]: line["mean"] for line in read_json_lines(folder.evaluations).records}


async def test_scores_outlive_the_queue_and_those_of_an_abandoned_future_do_not(
    store: TrajectoryStore, tmp_path: Path
) -> None:
    folder, notes = RunFolder(tmp_path), list[str]()
    journal = EvaluationJournal(store, folder, notes.append)
    await announce(store, range(10))
    await journal.update()
    for version, mean in ((0, 0.4), (5, 0.6), (9, 0.7)):
        await evaluate(store, tmp_path, version, mean)
        await journal.update()
    assert notes[0] == "policy version 0: evaluation 0.400 ± 0.020 (n=256)" and len(notes) == 3
    before = (await journal.finished(0), folder.evaluations.read_text())
    assert before[0] is not None and before[0].details == {"mean_length": 31.5}
    assert notes[1] == "policy version 5: evaluation 0.600 ± 0.020 (n=256); math 0.600 ± unknown (n=256)"
    lines = read_json_lines(folder.evaluations).records
    assert [line["domains"] for line in lines[:2]] == [{}, {"math": {"mean": 0.6, "standard_error": None, "n": 256}}]

    await store.connection.command("FLUSHALL")
    journal = EvaluationJournal(store, folder, notes.append)
    await journal.update()
    assert (await journal.finished(0), folder.evaluations.read_text()) == before, "nothing is known yet"
    await store.limits.init_run(run_limits(config(tmp_path)))
    await announce(store, range(7))
    await journal.update()
    assert means(folder) == {0: 0.4, 5: 0.6}
    assert await journal.finished(0) == before[0]
    assert await journal.finished(5) is None, "only the initial weights are sure to be the same ones"


async def test_few_prompts_and_an_unknown_error_are_noted_and_read_again(
    store: TrajectoryStore, tmp_path: Path
) -> None:
    folder, notes = RunFolder(tmp_path), list[str]()
    journal = EvaluationJournal(store, folder, notes.append)
    await announce(store, range(1))
    await journal.update()
    details = {REQUESTED_PROMPTS: 256.0, EXISTING_PROMPTS: 1.0}
    await evaluate(store, tmp_path, 0, 1.0, n=1, standard_error=None, details=details, discarded_count=0)
    await journal.update()
    split = "the evaluation split has 1 of evaluation.prompt_count=256 prompts"
    assert notes[0].startswith(f"policy version 0: evaluation 1.000 ± unknown (n=1); {split}: add rows")

    await store.connection.command("FLUSHALL")
    await store.limits.init_run(run_limits(config(tmp_path)))
    again = await EvaluationJournal(store, folder, notes.append).finished(0)
    assert again is not None and again.standard_error is None and again.details == details


async def test_answers_without_a_score_are_noted_beside_the_mean_of_the_others(
    store: TrajectoryStore, tmp_path: Path
) -> None:
    notes = list[str]()
    journal = EvaluationJournal(store, RunFolder(tmp_path), notes.append)
    await announce(store, range(1))
    await journal.update()
    await evaluate(store, tmp_path, 0, 0.5, n=251)
    await journal.update()
    assert "(n=251); 5 of 256 answers have no score and are left out of the mean" in notes[0]


async def test_an_evaluation_that_nothing_answered_replaces_no_score(store: TrajectoryStore, tmp_path: Path) -> None:
    folder, notes = RunFolder(tmp_path), list[str]()
    await announce(store, range(4))
    line = {"policy_version": 2, "n": 256, "mean": 0.5, "standard_error": 0.03}
    folder.evaluations.write_text(json.dumps({**line, "discarded": 0, "when": 1.0, "seconds": 2}) + "\n")
    journal = EvaluationJournal(store, folder, notes.append)
    await journal.update()
    for version in (2, 3):
        await evaluate(store, tmp_path, version, 0.0, n=0)
        await journal.update()
    assert means(folder) == {2: 0.5, 3: 0.0}
    assert notes[-1] == "policy version 3: evaluation without a score: none of 256 answers counts"
