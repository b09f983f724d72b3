"""The countdown recipe: demonstrations that never lie, a token per word, a model that knows its arithmetic, a demo."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from rollmesh.config import RunConfig, load_run_config
from rollmesh.config.recipes import recipe_file, resolve_model
from rollmesh.recipes.countdown.demonstrations import Demonstration, SearcherMix, draw_demonstration
from rollmesh.recipes.countdown.tokenizer import PAD, STOP_SIGNS, VOCABULARY, save_tokenizer, stop_token_ids
from rollmesh.recipes.countdown.warm_start import build_model
from rollmesh.scheduling import Schedule
from rollmesh.tasks.countdown import CountdownVerifier
from rollmesh.tasks.sources.source_protocol import build_prompt_source
from rollmesh.text import Tokenizer

RESPONSE = "1 + 7 = 8 ~ 12 = 4 , 4 + 8 = 12 ~ 12 = 0 !"


@pytest.fixture(scope="module")
def drawn() -> list[Demonstration]:
    rng = random.Random(5)
    return [draw_demonstration(rng, SearcherMix()) for _ in range(3000)]


def test_the_verifier_agrees_with_every_demonstration_and_none_shows_a_held_out_puzzle(
    drawn: list[Demonstration],
) -> None:
    for shown in drawn[:500]:
        puzzle = {"numbers": list(shown.puzzle.numbers), "target": shown.puzzle.target}
        assert (CountdownVerifier().verify(shown.response, puzzle).value == 1.0) == shown.solved
        assert not shown.puzzle.held_out
    assert {shown.solved for shown in drawn} == {True, False}


def test_every_trial_is_honest(drawn: list[Demonstration]) -> None:
    for shown in drawn[:300]:
        for trial in shown.response.rstrip("!? ").split(" , "):
            first, sign, second, _, result, _, target, _, difference = trial.split()
            expected = int(first) + int(second) if sign == "+" else int(first) - int(second)
            assert int(result) == expected >= 0
            assert int(target) == shown.puzzle.target
            assert int(difference) == abs(expected - shown.puzzle.target)
            assert first != second
            assert {int(first), int(second)} <= set(shown.puzzle.numbers)


def test_lengths_have_a_short_median_and_a_long_tail(drawn: list[Demonstration]) -> None:
    lengths = [len(shown.response.split()) for shown in drawn]
    median, p90, p99 = np.percentile(lengths, [50, 90, 99])
    assert 20 <= median <= 40 and 110 <= p90 <= 200 and 400 <= p99 <= max(lengths) <= 512


def test_every_word_is_one_token_as_transformers_reads_it_and_end_marks_stay_in_the_text(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer, theirs = Tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode(RESPONSE)
    assert [VOCABULARY[i] for i in ids] == RESPONSE.split()
    assert theirs.encode(RESPONSE, add_special_tokens=False) == ids.tolist()
    assert theirs.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids) == RESPONSE
    for sign in STOP_SIGNS:
        assert tokenizer.decode([VOCABULARY.index(word) for word in (PAD, "4", sign, PAD)]) == f"4 {sign}"


def test_the_committed_model_is_the_one_the_script_describes_and_knows_its_arithmetic() -> None:
    """Its most likely result and difference are right; that is what lets the search pay off."""
    folder = resolve_model("recipe:countdown")
    committed = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    described = build_model(0).state_dict()
    assert {n: w.shape for n, w in committed.state_dict().items()} == {n: w.shape for n, w in described.items()}
    assert Tokenizer(folder).eos_token_ids == tuple(stop_token_ids())
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


def test_the_demo_keeps_one_and_a_half_batches_in_flight_and_its_longest_prompt_fits() -> None:
    demo: RunConfig = load_run_config(recipe_file("countdown", "demo.yaml"), environ={})
    schedule = Schedule.from_config(demo)
    assert (schedule.preset, schedule.pool_size) == ("copris", 192)
    assert 1.0 <= schedule.expected_staleness <= 2.0
    assert demo.generator.replicas * demo.generator.slots >= schedule.pool_size
    prompts = build_prompt_source(demo.data, Tokenizer(resolve_model(demo.model.path)), demo.seed)
    longest = max(len(prompts.prompt(0, i).token_ids) for i in range(300))
    assert longest == 11 <= demo.data.max_prompt_tokens, "eight digits, >, target, :"
