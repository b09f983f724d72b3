"""The policies that benches publish."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.models import SMALL, PublishedModel, shape_of_size, token_logprobs, write_random_model


def test_weights_change_in_every_version_and_the_canary_is_scored_with_those_that_are_written(tmp_path: Path) -> None:
    write_random_model(tmp_path / "model", SMALL)
    model = PublishedModel(tmp_path / "model")
    canaries = []
    for version in (0, 1):
        write, score = model.policy(version)
        write(tmp_path / str(version))
        canaries.append(score()[0])
        written = AutoModelForCausalLM.from_pretrained(tmp_path / str(version), dtype=torch.float32).eval()
        wanted = token_logprobs(written, torch.tensor([canaries[-1].token_ids]))[0]
        np.testing.assert_allclose(canaries[-1].logprobs, wanted, atol=1e-4)
    assert canaries[0].logprobs != canaries[1].logprobs
    assert all(seconds > 0 for seconds in (*model.copy_seconds, model.canary_seconds))


@pytest.mark.parametrize("size", [32 << 20, 1 << 30])
def test_a_shape_has_about_the_size_that_is_asked_for(size: int) -> None:
    shape = shape_of_size(size)
    mlp = 3 * shape["hidden_size"] * shape["intermediate_size"]
    attention = 2 * shape["hidden_size"] ** 2 + 64 * shape["hidden_size"]
    parameters = shape["vocab_size"] * shape["hidden_size"] + shape["num_hidden_layers"] * (mlp + attention)
    assert abs(4 * parameters / size - 1) < 0.2
