"""Export of a run's policies: a folder that transformers loads, with the facts of the run beside it."""

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from rollmesh.cli.main import app
from rollmesh.config.model import AdapterConfig
from rollmesh.config.recipes import resolve_model
from rollmesh.config.trainer import TrainerConfig
from rollmesh.errors import CheckpointError
from rollmesh.report.model_export import trained_model_lines
from rollmesh.text import Tokenizer
from rollmesh.trainer.learner.policy_scorer import PolicyScorer
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer

from ...kit.checkpoint_samples import copy_of, publish
from .made_checkpoints import STEPS, MadeRun, make_audited_run

NEWEST = STEPS + 1


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    """A made run whose newest policy is the recipe's model, with a tokenizer of its own."""
    run = make_audited_run(tmp_path_factory.mktemp("export") / "run")
    model = copy_of(resolve_model("recipe:countdown"))
    run.store.mark_announced(publish(run.store, NEWEST, session="s7", step=STEPS, write=model))
    return run


def export(run: MadeRun, out: Path, *options: str) -> str:
    done = CliRunner().invoke(app, ["export", str(run.folder), str(out), *options])
    assert done.exit_code == 0, done.output
    return done.stdout


def weights(folder: Path) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(folder).model.embed_tokens.weight


def test_the_newest_policy_is_exported_and_loads_with_its_tokenizer(run: MadeRun, tmp_path: Path) -> None:
    out = tmp_path / "model"
    assert f"policy version {NEWEST}" in export(run, out)
    assert torch.equal(weights(out), weights(run.folder / "checkpoints" / "latest"))
    card = (out / "README.md").read_text()
    assert 'tokenizer = PreTrainedTokenizerFast.from_pretrained(".")' in card
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out)
    prompt = "12 50 5 > 57 : word"
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    assert ids[0].tolist() == Tokenizer(out).encode(prompt).tolist()
    assert tokenizer.decode(ids[0]) == "12 50 5 > 57 : <unk>"
    answer = AutoModelForCausalLM.from_pretrained(out).generate(ids, max_new_tokens=4, do_sample=False)
    assert answer.shape == (1, ids.shape[1] + 4)
    assert not (out / "manifest.json").exists()
    for fact in ("| Run | audited |", f"| Train step | {STEPS} of {STEPS} |", "`countdown`", "sha256 `"):
        assert fact in card
    assert os.listdir(tmp_path) == ["model"]
    place, load, copy = trained_model_lines(run.folder)
    folder = place.removeprefix("trained model: ").partition(" (")[0]
    assert f'from_pretrained("{folder}")' in load and torch.equal(weights(Path(folder)), weights(out))
    assert copy.endswith(f"rollmesh export {run.folder} OUT")


def test_the_card_names_the_variables_of_the_chat_template(run: MadeRun, tmp_path: Path) -> None:
    export(run, tmp_path / "model")
    assert "| Chat template (`chat_template_kwargs`) | no variables |" in (tmp_path / "model" / "README.md").read_text()
    folder = tmp_path / "run"
    shutil.copytree(run.folder, folder, symlinks=True)
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    settings["data"]["chat_template_kwargs"] = {"enable_thinking": False}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    export(MadeRun(folder), tmp_path / "other")
    assert '| `{"enable_thinking": false}` |' in (tmp_path / "other" / "README.md").read_text()


def test_an_older_version_is_exported_and_one_that_is_not_there_or_an_existing_folder_is_refused(
    run: MadeRun, tmp_path: Path
) -> None:
    export(run, tmp_path / "second", "--version", "2")
    assert not torch.equal(weights(tmp_path / "second"), weights(run.folder / "checkpoints" / "latest"))
    done = CliRunner().invoke(app, ["export", str(run.folder), str(tmp_path / "x"), "--version", "99"])
    assert done.exit_code == 2
    assert "--version 99: not in the checkpoints, which keep the versions 0, 1, 2" in done.stderr
    assert not (tmp_path / "x").exists()
    (tmp_path / "mine").mkdir()
    done = CliRunner().invoke(app, ["export", str(run.folder), str(tmp_path / "mine")])
    assert done.exit_code == 2
    assert "exists already; name a new folder" in done.stderr
    assert os.listdir(tmp_path / "mine") == []


def test_no_older_policy_is_exported_in_the_place_of_a_damaged_newest_one(audited: MadeRun, tmp_path: Path) -> None:
    (manifest,) = (audited.folder / "checkpoints" / "policies").glob(f"{STEPS:08d}-*/manifest.json")
    manifest.write_bytes(manifest.read_bytes()[:50])
    for version in ((), ("--version", str(STEPS))):
        done = CliRunner().invoke(app, ["export", str(audited.folder), str(tmp_path / "x"), *version])
        assert done.exit_code == 2
        assert str(manifest.parent.name) in done.stderr
    with pytest.raises(CheckpointError, match=f"the newest sound version is {STEPS - 1}: "):
        trained_model_lines(audited.folder)
    again = publish(audited.store, STEPS + 1, session="s7", step=STEPS)  # as a trainer does that finds it damaged
    audited.store.mark_announced(again)
    assert f"policy version {STEPS + 1}" in export(audited, tmp_path / "x")


def test_an_adapter_is_merged_into_its_base(run: MadeRun, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run.folder, folder, symlinks=True)
    store = MadeRun(folder).store
    base = store.complete_policies()[0]
    trainer = PolicyTrainer(
        store.open(base).folder, TrainerConfig(), adapter=AdapterConfig(rank=4, alpha=8), device="cpu"
    )
    torch.manual_seed(0)
    for name, tensor in trainer.state_tensors().items():
        if name.endswith("lora_B.weight"):
            tensor.normal_(std=0.1)
    record = publish(store, NEWEST + 1, session="s8", step=STEPS, write=trainer.copy_out().write, base=base)
    store.mark_announced(record)
    place, size, merge = trained_model_lines(folder)
    assert re.fullmatch(r"a version has [\d,]+ bytes of weights, full weights have [\d,]+ \(\d\.\d times\)", size)
    assert place.endswith("in PEFT form above policy version 0")
    assert merge.endswith(f"rollmesh export {folder} OUT")
    export(MadeRun(folder), tmp_path / "out", "--version", str(NEWEST + 1))
    assert not {"ANNOUNCED", "manifest.json", "adapter_config.json"} & set(os.listdir(tmp_path / "out"))
    ids = np.arange(1, 20, dtype=np.int32)
    (merged,) = PolicyScorer.from_folder(tmp_path / "out", device="cpu").logprobs([ids])
    assert merged == pytest.approx(trainer.logprobs([ids])[0], abs=1e-5)
    assert not np.allclose(merged, PolicyScorer.from_folder(store.open(base).folder).logprobs([ids])[0], atol=1e-3)
    parameters = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(tmp_path / "out").parameters())
    assert f"| Parameters | {parameters:,} (F32) |" in (tmp_path / "out" / "README.md").read_text()
