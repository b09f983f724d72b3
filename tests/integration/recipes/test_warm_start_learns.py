"""The warm start's training loop, from its first demonstration to a saved model."""

from __future__ import annotations

from pathlib import Path

import torch

from rollmesh.recipes.countdown.tokenizer import stop_token_ids
from rollmesh.recipes.countdown.warm_start import (
    WarmStartSettings,
    batches,
    build_model,
    response_loss,
    save,
    train,
)
from rollmesh.text import Tokenizer

TINY = WarmStartSettings(steps=12, tokens_per_batch=512, pool=64, warmup_steps=4)


def test_training_is_deterministic_and_learns(tmp_path: Path) -> None:
    inputs, labels = next(batches(WarmStartSettings(seed=99, tokens_per_batch=512, pool=64)))
    first, again = train(TINY, log_every=0), train(TINY, log_every=0)
    with torch.no_grad():
        before = response_loss(build_model(TINY.seed), inputs, labels, 512).item()
        after = response_loss(first, inputs, labels, 512).item()
    assert after < before - 0.5
    for name, weight in first.state_dict().items():
        torch.testing.assert_close(weight, again.state_dict()[name], rtol=0, atol=0)
    save(first, tmp_path / "model")
    assert Tokenizer(tmp_path / "model").eos_token_ids == tuple(stop_token_ids())
