"""A whole run in this process: what it learns, what it writes, and how it continues."""

import io
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from rollmesh.config.sft_config import SftConfig
from rollmesh.errors import ConfigError, TrainingDiverged
from rollmesh.preflight.run_checks import check_run
from rollmesh.sft.fine_tuning import fine_tune
from rollmesh.trainer.learner.policy_scorer import PolicyScorer

from ...kit.demonstration_rows import sft_config, write_rows
from ...kit.run_files import run_config


def never() -> bool:
    return False


def after(steps: int, effect: Callable[[], bool]) -> Callable[[], bool]:
    """Ask for ``effect`` after so many steps; a run asks once before each step."""
    asked = iter(range(steps))
    return lambda: next(asked, None) is None and effect()


def lines(config: SftConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(config.folder) / "metrics.jsonl").read_text().splitlines()]


def curve(config: SftConfig) -> list[tuple[Any, ...]]:
    """What must not depend on when a run was stopped."""
    fields = ("train_step", "loss", "learning_rate", "grad_norm", "trained_tokens", "epoch")
    held_out = [line["evaluation"] and line["evaluation"]["loss"] for line in lines(config)]
    return [(*(line.get(f) for f in fields), loss) for line, loss in zip(lines(config), held_out, strict=True)]


def weights(config: SftConfig) -> bytes:
    return (Path(config.folder) / "model" / "model.safetensors").read_bytes()


def train(config: SftConfig, stop: Callable[[], bool] = never) -> Path | None:
    return fine_tune(config, stop, None)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> SftConfig:
    """A run of two epochs that nothing stopped."""
    trainer = {"epochs": 2, "lr_schedule": "cosine", "evaluation_every_steps": 4, "state_every_steps": 3}
    config = sft_config(tmp_path_factory.mktemp("sft"), "whole", trainer=trainer)
    assert train(config) == Path(config.folder) / "model"
    return config


def another(config: SftConfig, name: str, **trainer: Any) -> SftConfig:
    """The same run in another folder."""
    section = config.trainer.model_copy(update=trainer)
    folder = Path(config.folder).with_name(name)
    return config.model_copy(update={"folder": str(folder), "trainer": section})


def test_the_losses_of_the_rows_and_of_those_held_out_fall(whole: SftConfig) -> None:
    recorded = lines(whole)
    assert [line["train_step"] for line in recorded] == list(range(13))
    held_out = [line["evaluation"]["loss"] for line in recorded if line["evaluation"]]
    assert [line["train_step"] for line in recorded if line["evaluation"]] == [0, 4, 8, 12]
    assert held_out[-1] < held_out[1] < held_out[0]
    losses = [line["loss"] for line in recorded[1:]]
    assert sum(losses[6:]) < sum(losses[:6]), "the second epoch has the rows of the first"
    assert [line["epoch"] for line in recorded[1:]] == [pytest.approx(step / 6) for step in range(1, 13)]


@pytest.mark.parametrize("steps", [1, 5, 12], ids=lambda steps: f"after {steps} steps")
def test_a_run_that_was_stopped_continues_to_the_same_bits(whole: SftConfig, steps: int) -> None:
    config = another(whole, f"stopped-{steps}")
    finished = train(config, after(steps, lambda: True))
    assert (finished is None) is (steps < 12)
    assert len(lines(config)) == steps + 1
    train(config)
    assert curve(config) == curve(whole)
    assert weights(config) == weights(whole)


def test_a_run_that_was_killed_before_its_first_state_begins_again(whole: SftConfig) -> None:
    def kill() -> bool:
        raise KeyboardInterrupt

    config = another(whole, "killed")
    with pytest.raises(KeyboardInterrupt):
        train(config, after(2, kill))
    train(config)
    assert curve(config) == curve(whole)


def test_a_damaged_state_is_replaced_by_the_one_before(whole: SftConfig, tmp_path: Path) -> None:
    config = another(whole, "damaged")
    shutil.copytree(whole.folder, config.folder)
    newest = sorted((Path(config.folder) / "checkpoints" / "states").iterdir())[-1]
    (shard,) = newest.glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    shown = io.StringIO()
    fine_tune(config, never, shown)
    assert "continuing from an older state" in shown.getvalue()
    assert "continuing after train step 9 of 12" in shown.getvalue()
    assert curve(config) == curve(whole)
    assert weights(config) == weights(whole)


def test_a_finished_run_writes_its_model_again_and_goes_on_when_it_is_longer(whole: SftConfig) -> None:
    config = another(whole, "longer")
    shutil.copytree(whole.folder, config.folder)
    shutil.rmtree(Path(config.folder) / "model")
    train(config)
    assert weights(config) == weights(whole)
    assert "Loss of held-out rows | 0." in (Path(config.folder) / "model" / "README.md").read_text()
    train(another(config, "longer", epochs=3))
    assert [line["train_step"] for line in lines(config)] == list(range(19))
    assert weights(config) != weights(whole)
    recorded = (Path(config.folder) / "sft.yaml").read_text()
    with pytest.raises(ConfigError, match=r"they make 6 train steps, and the training in .* has done 18; set more"):
        train(another(config, "longer", epochs=1))
    assert (Path(config.folder) / "sft.yaml").read_text() == recorded
    assert not list(Path(config.folder).glob(".model*"))


def test_the_model_loads_in_transformers_and_is_the_model_of_a_run(whole: SftConfig) -> None:
    folder = Path(whole.folder) / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = tokenizer("1 2 5 > 7 :", return_tensors="pt")["input_ids"]
    assert torch.isfinite(model(ids).logits).all()
    fields = "data.source.type=countdown generator.max_context_tokens=640 data.max_prompt_tokens=64"
    check_run(run_config(f"model.path={folder} {fields}", base="name=next folder=runs/next"))


ADAPTER = {"adapter": {"rank": 4, "alpha": 8, "dropout": 0.1}}


def test_an_adapter_continues_to_the_same_bits_and_is_merged_into_its_base(tmp_path: Path) -> None:
    fields: Mapping[str, Any] = {"model": ADAPTER, "trainer": {"learning_rate": 1e-2, "state_every_steps": 2}}
    whole, stopped = sft_config(tmp_path, "whole", **fields), sft_config(tmp_path, "stopped", **fields)
    folder = train(whole)
    assert train(stopped, after(3, lambda: True)) is None
    train(stopped)
    assert weights(stopped) == weights(whole)
    losses = [line["evaluation"]["loss"] for line in lines(whole) if line["evaluation"]]
    assert losses[-1] < losses[0]
    assert folder is not None
    assert not (folder / "adapter_config.json").exists()
    last = sft_config(tmp_path, "last", model={"path": str(folder)}, trainer={"train_steps": 1})
    train(last)
    assert lines(last)[0]["evaluation"]["loss"] == pytest.approx(losses[-1], abs=1e-5), "merged, it has the same loss"
    PolicyScorer.from_folder(folder, device="cpu")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 4}, "seed=4: .* began with 3"),
        ({"data": {"shuffle": False}}, "data.shuffle=False: .* began with True"),
        ({"trainer": {"batch_rows": 4}}, "trainer.batch_rows=4: .* began with 8"),
        ({"model": {"dtype": "bfloat16"}}, "model.dtype=bfloat16: .* began with float32"),
        ({"model": {"adapter": {"rank": 4}}}, "model.adapter=rank 4.*: this run was trained with null"),
    ],
)
def test_a_continued_run_keeps_what_its_bits_depend_on(
    change: dict[str, Any], words: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "refused"
    if not folder.exists():
        folder.mkdir()
        train(sft_config(folder, trainer={"train_steps": 1}))
    change = {**change, "trainer": {"train_steps": 2, **change.get("trainer", {})}}
    with pytest.raises(ConfigError, match=words):
        train(sft_config(folder, **change))


def test_a_continued_run_refuses_other_rows(tmp_path: Path) -> None:
    train(sft_config(tmp_path, trainer={"train_steps": 1}))
    write_rows(tmp_path / "train.jsonl", 48, seed=9)
    with pytest.raises(ConfigError, match=r"data\.train=rows with the digest .* name another folder"):
        train(sft_config(tmp_path, trainer={"train_steps": 2}))


def test_a_rate_that_breaks_the_model_ends_the_run_with_the_remedy(tmp_path: Path) -> None:
    config = sft_config(tmp_path, trainer={"learning_rate": 1e30, "epochs": 2, "max_grad_norm": 1e30})
    with pytest.raises(
        TrainingDiverged, match=r"gradients of the last 2 updates are not finite .* lower trainer\.lear"
    ):
        train(config)


def test_rows_longer_than_the_model_are_refused_before_it_loads(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"data\.max_tokens=4096 is more than the model's max_position_embeddings=1024"
    ):
        train(sft_config(tmp_path, data={"max_tokens": 4096}))
