"""The loss of a train step: registered, or a function of the user's code."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh.algorithms.losses.loss_registry import LOSSES
from rollmesh.config.trainer import AlgorithmConfig, TrainerConfig
from rollmesh.errors import ConfigError
from rollmesh.trainer.learner.step_settings import loss_recipe, step_recipe


def test_a_users_loss_has_the_defaults_of_ppo_clip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_losses.py").write_text("def mine(data, options):\n    return 'mine'\n\n\nbound = 0.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    algorithm = AlgorithmConfig(loss="my_losses:mine")
    recipe = step_recipe(TrainerConfig(algorithm=algorithm), max_token_staleness=None)
    own, registered = loss_recipe(recipe.algorithm), loss_recipe(AlgorithmConfig())
    assert own.loss(None, own.options) == "mine"  # type: ignore[arg-type]
    assert registered.loss is LOSSES["ppo_clip"].loss
    assert (own.options, own.aggregation) == (registered.options, registered.aggregation)
    for target, problem in (("my_losses:bound", "must be a function"), ("my_losses:other", "has no 'other'")):
        with pytest.raises(ConfigError, match=f"trainer.algorithm.loss: .*{problem}"):
            loss_recipe(AlgorithmConfig(loss=target))
