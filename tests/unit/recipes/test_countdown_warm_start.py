"""Data of the warm start, and its committed model."""

from __future__ import annotations

import json
import random
from itertools import islice

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollmesh.config.recipes import resolve_model
from rollmesh.recipes.countdown.demonstrations import SearcherMix, draw_demonstration
from rollmesh.recipes.countdown.tokenizer import VOCABULARY, stop_token_ids
from rollmesh.recipes.countdown.warm_start import (
    WarmStartSettings,
    batches,
    build_model,
    response_loss,
)
from rollmesh.text import Tokenizer

TINY = WarmStartSettings(steps=12, tokens_per_batch=512, pool=64, warmup_steps=4)


@pytest.fixture(scope="module")
def committed() -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(resolve_model("recipe:countdown"))
    return model.eval()


def test_batches_label_the_response_and_nothing_else() -> None:
    for inputs, labels in islice(batches(TINY), 20):
        assert inputs.shape == labels.shape
        assert inputs.numel() <= TINY.tokens_per_batch or len(inputs) == 1
        for tokens, label in zip(inputs, labels, strict=True):
            start = tokens.tolist().index(VOCABULARY.index(":")) + 1
            length = int((tokens != 0).sum())
            assert (label[:start] == -100).all()
            assert (label[start:length] == tokens[start:length]).all()
            assert (label[length:] == -100).all()


def test_the_loss_is_the_log_likelihood_of_the_response_over_the_budget() -> None:
    model = build_model(0)
    inputs, labels = next(batches(TINY))
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=inputs).logits.double(), -1)
        total = sum(
            -logprobs[row, at - 1, inputs[row, at]].item()
            for row in range(len(inputs))
            for at in range(1, inputs.shape[1])
            if labels[row, at] != -100
        )
        assert response_loss(model, inputs, labels, 512).item() == pytest.approx(total / 512, rel=1e-4)


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
