"""The loss of a train step: registered, or a function of the user's code."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh.config.loss_methods import MaskConfig
from rollmesh.config.trainer import AlgorithmConfig, TrainerConfig
from rollmesh.errors import ConfigError
from rollmesh.trainer.learner.method_binding import loss_recipe, step_recipe


def test_a_users_loss_has_the_defaults_of_ppo_clip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_losses.py").write_text("from rollmesh.algorithms.losses import ppo_clip as mine\n\n\nbound = 0.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    algorithm = AlgorithmConfig(loss="my_losses:mine")
    recipe = step_recipe(TrainerConfig(algorithm=algorithm), max_token_staleness=None)
    own, registered = loss_recipe(recipe.algorithm), loss_recipe(AlgorithmConfig())
    assert (own.options, own.aggregation) == (registered.options, registered.aggregation)
    for target, problem in (("my_losses:bound", "must be a plain function"), ("my_losses:other", "has no 'other'")):
        with pytest.raises(ConfigError, match=f"trainer.algorithm.loss: .*{problem}"):
            loss_recipe(AlgorithmConfig(loss=target))


def test_a_recipe_records_the_defaults_of_every_method() -> None:
    algorithm = AlgorithmConfig(
        advantage="mc_grpo", loss="kimi", masks=(MaskConfig(name="icepop", options={"high": 2.0}),)
    )
    recorded = step_recipe(TrainerConfig(algorithm=algorithm), max_token_staleness=None).algorithm
    assert recorded.advantage_options == {"adv_clip": 5.0} and recorded.loss_options == {"tau": 0.1}
    assert recorded.masks[0].options == {"low": 0.5, "high": 2.0}
    assert AlgorithmConfig.model_validate_json(recorded.model_dump_json()) == recorded
