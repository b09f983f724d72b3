"""The demo's run file is valid and says what the recipe says."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh.config import RunConfig, load_run_config
from rollmesh.config.recipes import recipe_file, resolve_model
from rollmesh.errors import ConfigError
from rollmesh.scheduling import Schedule
from rollmesh.tasks.sources.source_protocol import build_prompt_source
from rollmesh.text import Tokenizer


@pytest.fixture(scope="module")
def demo() -> RunConfig:
    return load_run_config(recipe_file("countdown", "demo.yaml"), environ={})


def test_the_demo_is_the_recipe(demo: RunConfig) -> None:
    assert (demo.name, demo.folder) == ("demo", "runs/demo")
    assert demo.trainer.train_steps >= 36
    assert demo.trainer.learning_rate == 4e-4
    assert demo.trainer.algorithm.kl_coefficient == 0.0
    assert (demo.trainer.algorithm.clip_low, demo.trainer.algorithm.clip_high) == (0.2, 0.28)
    assert (demo.evaluation.prompt_count, demo.evaluation.temperature) == (256, 1.0)


def test_the_demo_keeps_one_and_a_half_batches_in_flight(demo: RunConfig) -> None:
    schedule = Schedule.from_config(demo)
    assert schedule.preset == "copris"
    assert schedule.pool_size == 192
    assert 1.0 <= schedule.expected_staleness <= 2.0
    assert demo.generator.replicas * demo.generator.slots >= schedule.pool_size


def test_the_longest_prompt_fits(demo: RunConfig) -> None:
    tokenizer = Tokenizer(resolve_model(demo.model.path))
    prompts = build_prompt_source(demo.data, tokenizer, demo.seed)
    longest = max(len(prompts.prompt(0, i).token_ids) for i in range(300))
    assert longest == 11, "eight digits, >, target, :"
    assert longest <= demo.data.max_prompt_tokens


def test_a_recipe_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"recipe:chess.*recipes: countdown"):
        resolve_model("recipe:chess")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"contains no config\.json"):
        resolve_model(str(tmp_path))
