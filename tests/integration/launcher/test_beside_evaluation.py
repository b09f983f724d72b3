"""``rollmesh eval`` with other data and settings: what cannot be evaluated is refused before anything starts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.manifest import CanarySequence
from rollmesh.checkpoints.sealing import run_secret
from rollmesh.cli.main import app
from rollmesh.config import RunConfig, write_run_config
from rollmesh.config.recipes import resolve_model
from rollmesh.launcher.evaluations import source_of

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
    record = store.publish(
        session="made",
        policy_version=0,
        train_step=0,
        parent=None,
        write=lambda folder: shutil.copytree(resolve_model("recipe:countdown"), folder, dirs_exist_ok=True) and None,
        canary=[CanarySequence(token_ids=[1, 2], logprobs=[-1.0])],
    )
    store.mark_announced(record)
    return tmp_path


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--set", "evaluation.prompt_count=none"], "evaluation.prompt_count"),
        (["--set", "evaluation.nosuch=1"], "evaluation.nosuch"),
        (["--set", "data.evaluation_source={type: jsonl, path: absent.jsonl}"], "absent.jsonl"),
        (["--set", "rollout.program=agent"], "cannot run the agent"),
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
