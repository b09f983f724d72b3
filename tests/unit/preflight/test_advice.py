"""Estimate of a run file, memory of the model, and hints for values that do not fit."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollmesh.cli.main import app
from rollmesh.config import RunConfig, load_run_config
from rollmesh.config.recipes import recipe_file, resolve_model
from rollmesh.errors import ConfigError
from rollmesh.preflight.advice import estimate, run_hints
from rollmesh.preflight.run_model import ModelMemory, RunModel
from rollmesh.preflight.trial import try_inputs
from rollmesh.text import Tokenizer
from rollmesh.user_code import CODE_FOLDER

from ...kit.run_files import made_run

DOCUMENT = " ".join((Path(__file__).parents[3] / "docs" / "operations.md").read_text().split())


def run(**sections: Any) -> RunConfig:
    return made_run(**{"generator": {"max_context_tokens": 2048}, **sections})


def model_memory(config: RunConfig) -> ModelMemory:
    return RunModel(config).memory()


def trial_hints(config: RunConfig) -> list[str]:
    return try_inputs(RunModel(config))


def table(folder: Path, rows: int) -> dict[str, Any]:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"1 2 > {n} :", "answer": "3"}) + "\n\n" for n in range(rows)))
    return {"source": {"type": "jsonl", "path": str(file)}}


def test_the_memory_follows_from_the_weights_and_the_sizes_of_the_run_file() -> None:
    memory = model_memory(run(generator={"slots": 4, "max_context_tokens": 2048}))
    assert memory.parameter_count == 249_984
    assert (memory.trainer_bytes, memory.weight_bytes) == (16 * 249_984, 4 * (249_984 + 96 * 96)), (
        "the tied head is a copy"
    )
    # 4 layers of 3 heads of 32 in float32: keys and values of 4 slots of 2,048 tokens
    assert memory.cache_bytes % (4 * 2048 * 2 * 4) == 0
    half = model_memory(run(model={"path": "recipe:countdown", "dtype": "bfloat16"}, launcher={"trainer_processes": 2}))
    assert (half.trainer_bytes, half.weight_bytes) == (8 * 249_984, 2 * (249_984 + 96 * 96))


def test_the_largest_models_follow_from_the_bytes_of_the_optimizer() -> None:
    whole = model_memory(run()).largest_models()
    assert "1.5 billion parameters in 24 GB, 5 billion parameters in 80 GB, 8.81 billion parameters in 141 GB" in whole
    small = model_memory(run(trainer={"optimizer": "adamw_8bit"}))
    assert small.parameter_bytes == 10 and "2.4 billion parameters in 24 GB" in small.largest_models()
    host = model_memory(
        run(trainer={"optimizer": "adamw_offload", "device": "cuda"}, launcher={"trainer_processes": 2})
    )
    assert (host.parameter_bytes, host.host_bytes) == (8, 8 * 249_984)
    assert "8 bytes a trained parameter, shared by the ranks) and 1.0 MB in host memory, each" in host.sentence()
    assert model_memory(run(trainer={"optimizer": "adamw_offload", "device": "cpu"})).parameter_bytes == 16
    average = {"algorithm": {"loss": "decoupled_ppo", "old_logprobs": "ewma"}}
    assert model_memory(run(trainer=average)).parameter_bytes == 20


def test_with_an_adapter_the_moments_are_those_of_the_adapter() -> None:
    model = {"path": "recipe:countdown", "adapter": {"rank": 2, "target": ["q_proj", "down_proj"]}}
    memory = model_memory(run(model=model))
    # 3 layers: q_proj from 96 to 96, down_proj from 192 to 96
    assert memory.adapter_parameters == 3 * 2 * (96 + 96 + 192 + 96)
    assert memory.trainer_bytes == 4 * 249_984 + 16 * memory.adapter_parameters
    assert memory.version_bytes == 4 * memory.adapter_parameters
    half = model_memory(run(model=model | {"dtype": "bfloat16"}))
    layers = 3 * (96 * 96 + 2 * 96 * 32 + 96 * 96 + 3 * 96 * 192)
    assert half.trainer_bytes == memory.trainer_bytes - 2 * layers, "on a GPU the layers of the blocks are in bfloat16"
    assert memory.adapter_sentence() == (
        "adapter: 2,880 parameters are trained (1.2% of the model's); a version has 11,520 bytes of weights instead of "
        "999,936"
    )
    assert model_memory(run()).adapter_sentence() == ""
    unknown = {"path": "recipe:countdown", "adapter": {"target": ["query"]}}
    with pytest.raises(ConfigError, match="model.adapter.target: the base has no linear layer query; it has down_proj"):
        model_memory(run(model=unknown))


def old(source: str, **trainer: Any) -> dict[str, Any]:
    return {"trainer": {"algorithm": {"loss": "decoupled_ppo", "old_logprobs": source}, **trainer}}


SMALL, USUAL = 250_000, 600_000_000


@pytest.mark.parametrize(
    ("sections", "parameters", "hint"),
    [
        ({}, SMALL, "hint: trainer.learning_rate=1e-06 suits .*try 0.0001$"),
        ({}, USUAL, None),
        ({"trainer": {"learning_rate": 4e-4}}, SMALL, None),
        ({"trainer": {"learning_rate": 2e-3}}, SMALL, None),  # the rate of the adapter demo
        ({"trainer": {"learning_rate": 100.0}}, USUAL, "hint: trainer.learning_rate=100 is far above.*diverge"),
        ({"trainer": {"warmup_steps": 40, "train_steps": 40}}, USUAL, "warmup_steps=40 with trainer.train_steps=40"),
        ({"trainer": {"warmup_steps": 39, "train_steps": 40}}, USUAL, None),
        (old("recompute"), USUAL, "old_logprobs=recompute with .*minibatches=1: .* on tokens up to 4 train steps old"),
        (old("recompute", minibatches=4), USUAL, None),
        (old("recompute") | {"schedule": {"preset": "sync"}}, USUAL, None),
        (old("snapshot"), USUAL, None),
        (
            {"evaluation": {"temperature": 0, "samples_per_prompt": 8}},
            USUAL,
            "samples_per_prompt=8 with evaluation.temperature=0.*set samples_per_prompt=1",
        ),
        (
            {"evaluation": {"prompt_count": 16, "samples_per_prompt": 16}},
            USUAL,
            "over 16 prompts has a standard error of up to 0.12; 256 prompts have 0.03: raise evaluation.prompt_count$",
        ),
    ],
)
def test_a_value_that_suits_no_run_is_hinted_at_with_a_better_one(
    sections: dict[str, Any], parameters: int, hint: str | None
) -> None:
    hints = run_hints(run(**sections), parameters)
    assert len(hints) == (hint is not None)
    assert hint is None or re.search(hint, hints[0])


@pytest.mark.parametrize(
    ("rows", "data", "expected", "coarse"),
    [
        (100, {}, "evaluation.prompt_count=256: the evaluation split has about 5 prompts; add rows, raise", True),
        (100, {"held_out_ratio": 0}, "evaluation.prompt_count=256: the evaluation split has about 100 prompts", False),
        (1, {}, "evaluation.prompt_count=256: the evaluation split has about 1 prompts", True),
        (6000, {}, "", False),
    ],
)
def test_a_table_with_too_few_rows_for_the_evaluation_is_named(
    tmp_path: Path, rows: int, data: dict[str, Any], expected: str, coarse: bool
) -> None:
    hints = run_hints(run(data={**table(tmp_path, rows), **data}), 600_000_000)
    assert any(expected in hint for hint in hints) if expected else hints == []
    assert any("a standard error of up to" in hint for hint in hints) is coarse
    assert run_hints(run(data=table(tmp_path, rows), evaluation={"before_and_after": False}), 600_000_000) == []


def test_validate_prints_memory_and_hints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CODE_FOLDER, "")
    sizes = {"generator": {"max_context_tokens": 640}, "data": {"max_prompt_tokens": 64}, "gateway": {"port": 0}}
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({"name": "a", "folder": "r", "model": {"path": "recipe:countdown"}, **sizes}))
    result = CliRunner().invoke(app, ["config", "validate", str(file)])
    assert result.exit_code == 0
    assert "model: 249,984 parameters; memory without activations: each trainer rank 4.0 MB" in result.output
    assert "hint: trainer.learning_rate=1e-06 suits models of a billion parameters" in result.output


@pytest.mark.parametrize(("answer", "problem"), [(r"\$32,\!348", None), ("$$", "not mathematics that sympy can read")])
def test_the_trial_tries_more_than_the_reference_itself(tmp_path: Path, answer: str, problem: str | None) -> None:
    pytest.importorskip("math_verify")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "3 7 > 4 :", "answer": answer}) + "\n")
    data = {"source": {"type": "jsonl", "path": str(rows)}, "held_out_ratio": 0}
    config = run(data=data, reward={"verifier": "math"})
    if problem is None:
        assert trial_hints(config) == []
        return
    with pytest.raises(ConfigError, match=problem):
        trial_hints(config)


def test_the_trial_counts_the_words_that_the_model_does_not_know(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"

    def hints(prompt: str) -> list[str]:
        rows.write_text(json.dumps({"prompt": prompt, "answer": "7"}) + "\n")
        data = {"source": {"type": "jsonl", "path": str(rows)}, "held_out_ratio": 0}
        return trial_hints(run(data=data, reward={"verifier": "exact"}))

    (hint,) = hints("which is larger , 7 ok")
    assert hint.startswith("hint: data.source: 4 of 6 tokens of ")
    assert "are unknown to the tokenizer of model.path=recipe:countdown" in hint
    assert hints("3 7 > 4 :") == []


def test_a_reference_that_a_new_run_does_not_have_is_named(tmp_path: Path) -> None:
    trainer = {"algorithm": {"kl_coefficient": 0.1, "kl_reference_version": 5}}
    (hint,) = run_hints(run(trainer=trainer, folder=str(tmp_path)), 600_000_000)
    assert "trainer.algorithm.kl_reference_version=5: a new run has version 0 only" in hint
    (tmp_path / "config.yaml").write_text("name: continued")
    assert run_hints(run(trainer=trainer, folder=str(tmp_path)), 600_000_000) == []


def changed_model(folder: Path, *, eos: object, template: str = "") -> dict[str, Any]:
    """The model of the recipe with other end tokens, and perhaps a chat template."""
    shutil.copytree(resolve_model("recipe:countdown"), folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("eos_token", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return {"path": str(folder)}


def test_a_model_without_an_end_token_is_named_before_every_answer_is_truncated(tmp_path: Path) -> None:
    (hint,) = trial_hints(run(model=changed_model(tmp_path / "m", eos=None), rollout={"max_new_tokens": 77}))
    assert "the model has no end token" in hint and "rollout.max_new_tokens=77" in hint
    assert trial_hints(run(model=changed_model(tmp_path / "n", eos=[2]))) == []


def test_an_end_token_without_an_embedding_is_ignored_with_a_hint(tmp_path: Path) -> None:
    model = changed_model(tmp_path / "m", eos=[2, 999])
    assert Tokenizer(model["path"]).eos_token_ids == (2,)
    (hint,) = trial_hints(run(model=model))
    assert "eos_token_id 999 is outside the vocabulary" in hint and "it is ignored" in hint


def test_plain_prompts_for_a_model_with_a_chat_template_are_named(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    model, data = changed_model(tmp_path / "m", eos=[2], template=template), table(tmp_path, 4)
    (hint,) = trial_hints(run(model=model, data=data, reward={"verifier": "exact"}))
    assert hint.startswith("hint: data.source.chat=false, but model.path=") and hint.endswith("set chat: true")
    data["source"]["chat"] = True
    assert trial_hints(run(model=model, data=data, reward={"verifier": "exact"})) == []


def meaning(**schedule: Any) -> dict[str, str]:
    """Meaning of every quantity of the estimate, with its value in front."""
    advantage = "reinforce_pp" if schedule["preset"] == "sorted" else "grpo"
    config = made_run(schedule=schedule, trainer={"algorithm": {"advantage": advantage}})
    columns = estimate(config).table().columns
    names, numbers, meanings = ([str(cell) for cell in column.cells] for column in columns)
    return {name: f"{number}: {text}" for name, number, text in zip(names, numbers, meanings, strict=True)}


@pytest.mark.parametrize(
    ("preset", "quantity", "number"),
    [
        ("rollpacker", "begun again", "at most 0.20"),
        ("sorted", "begun again", "at most 1.50"),
        ("roll", "evicted", "depends on the lengths"),
    ],
)
def test_a_schedule_that_drops_tokens_over_the_bound_says_how_often_and_where_their_number_is_predicted(
    preset: str, quantity: str, number: str
) -> None:
    found = meaning(preset=preset, groups_per_batch=16)
    assert found[quantity].startswith(f"{number}: ") and "rollmesh sim RUN.yaml" in found[quantity]
    assert not {"begun again", "evicted"} & meaning(preset="copris").keys()


def large(batch: int, group: int, pool: int, prompt: int, response: int) -> RunConfig:
    schedule = {"groups_per_batch": batch, "group_size": group, "pool_size": pool, "max_staleness": 4}
    return made_run(
        data={"max_prompt_tokens": prompt},
        rollout={"max_new_tokens": response, "partial_save_tokens": 1024},
        generator={"max_context_tokens": prompt + response},
        schedule={"preset": "copris", **schedule},
    )


def test_the_demos_queue_is_the_one_that_the_document_computes() -> None:
    found = estimate(load_run_config(recipe_file("countdown", "demo.yaml"), environ={}))
    assert f"5 * 16 * (512 + 8 * 5,956) = {found.queue_bytes / 1e6:.1f} MB in Redis" in DOCUMENT


@pytest.mark.parametrize(
    ("config", "words", "redis_gb"),
    [
        (large(32, 8, 256, 1000, 16_384), "160 * (8,000 + 8 * 134,012) = {:.0f} MB", 0.512),
        (large(128, 16, 2048, 1000, 32_768), "640 * (8,000 + 16 * 266,524) = {:.1f} GB", 8.0),
    ],
    ids=["7B", "32B"],
)
def test_the_large_examples_add_up(config: RunConfig, words: str, redis_gb: float) -> None:
    found = estimate(config)
    unit = 1e6 if words.endswith("MB") else 1e9
    assert words.format(found.queue_bytes / unit) in DOCUMENT
    assert found.schedule.expected_staleness == 1.0
    # 80% of it for the queue, and room for the fork of an AOF rewrite.
    assert 0.8 * redis_gb * 1e9 < found.queue_bytes * 1.25 * 2 <= redis_gb * 1e9
