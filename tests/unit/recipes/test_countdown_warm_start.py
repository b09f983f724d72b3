"""The committed model of the warm start."""

from __future__ import annotations

import json
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollmesh.config.recipes import resolve_model
from rollmesh.recipes.countdown.demonstrations import SearcherMix, draw_demonstration
from rollmesh.recipes.countdown.tokenizer import VOCABULARY, stop_token_ids
from rollmesh.recipes.countdown.warm_start import build_model
from rollmesh.text import Tokenizer


@pytest.fixture(scope="module")
def committed() -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(resolve_model("recipe:countdown"))
    return model.eval()


def test_the_committed_model_is_the_one_the_script_describes(committed: torch.nn.Module) -> None:
    described = build_model(0)
    assert {n: w.shape for n, w in committed.state_dict().items()} == {
        n: w.shape for n, w in described.state_dict().items()
    }
    assert all(w.dtype == torch.float32 for w in committed.parameters())
    assert 200_000 < sum(w.numel() for w in committed.parameters()) < 300_000
    folder = resolve_model("recipe:countdown")
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == stop_token_ids()
    assert Tokenizer(folder).vocab_size == len(VOCABULARY)


def test_the_committed_model_knows_its_arithmetic(committed: torch.nn.Module) -> None:
    """Its most likely result and difference are right; that is what lets the search pay off."""
    rng = random.Random(11)
    right = total = 0
    for _ in range(40):
        shown = draw_demonstration(rng, SearcherMix())
        words = shown.puzzle.text.split() + shown.response.split()
        ids = torch.tensor([[VOCABULARY.index(word) for word in words]])
        with torch.no_grad():
            best = committed(input_ids=ids).logits[0].argmax(-1)
        after_equals = [i for i, word in enumerate(words) if word == "="]
        right += sum(int(best[i] == ids[0, i + 1]) for i in after_equals)
        total += len(after_equals)
    assert right / total > 0.97
