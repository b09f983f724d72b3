"""The policies that benches publish."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import rollmesh.recipes.countdown
from benchmarks.models import SMALL, RandomModel, SavedModel
from rollmesh.errors import ConfigError

FOLDER = Path(rollmesh.recipes.countdown.__file__).parent / "model"


def logprobs(folder: Path, ids: list[int]) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        found = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [float(found[i, token]) for i, token in enumerate(ids[1:])]


def test_a_saved_model_is_published_as_it_is_with_a_canary_of_its_own(tmp_path):
    model = SavedModel(FOLDER, 512)
    write, score = model.policy(3)
    write(tmp_path)
    canary = score()
    assert (tmp_path / "model.safetensors").read_bytes() == (FOLDER / "model.safetensors").read_bytes()
    assert (
        model.dtype == "float32" and model.vocab_size == json.loads((FOLDER / "config.json").read_text())["vocab_size"]
    )
    assert len(canary) == 8
    np.testing.assert_allclose(canary[5].logprobs, logprobs(tmp_path, canary[5].token_ids), atol=1e-4)


def test_random_models_differ_by_version(tmp_path):
    model = RandomModel(shape=SMALL)
    canaries = []
    for version in (0, 1):
        write, score = model.policy(version)
        write(tmp_path / str(version))
        canary = score()
        np.testing.assert_allclose(
            canary[0].logprobs, logprobs(tmp_path / str(version), canary[0].token_ids), atol=1e-4
        )
        canaries.append(canary[0].logprobs)
    assert canaries[0] != canaries[1]


@pytest.mark.parametrize(
    ("config", "message"), [(None, "expected a Hugging Face folder"), ({"vocab_size": 9}, "expected a Hugging Face")]
)
def test_a_folder_that_is_no_model_is_refused(tmp_path, config, message):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        SavedModel(tmp_path, 512)


def test_a_model_with_too_few_positions_is_refused():
    with pytest.raises(ConfigError, match="the bench needs 1000000"):
        SavedModel(FOLDER, 1000000)
