from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollmesh.errors import ConfigError
from rollmesh.sim.roofline import (
    MODELS,
    Efficiencies,
    Roofline,
    find_gpu,
    find_model,
    kv_bytes_per_token,
    multiplied_weight_count,
    weight_count,
)

PEAK = Efficiencies(memory=1.0, compute=1.0, step_seconds=0.0, cache_share=1.0)


def roofline(gpu: str, model: str, *, tensor_parallel: int = 1, efficiencies: Efficiencies = PEAK) -> Roofline:
    return Roofline(
        gpu=find_gpu(gpu), model=find_model(model), tensor_parallel=tensor_parallel, efficiencies=efficiencies
    )


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        # As the model cards give them, in billions.
        ("qwen2.5-0.5b", 0.49e9),
        ("qwen2.5-1.5b", 1.54e9),
        ("r1-distill-qwen-1.5b", 1.78e9),
        ("qwen2.5-7b", 7.61e9),
        ("qwen2.5-14b", 14.7e9),
        ("qwen2.5-32b", 32.5e9),
        ("qwen3-4b", 4.0e9),
        ("qwen3-8b", 8.2e9),
        ("qwen3-14b", 14.8e9),
        ("qwen3-32b", 32.8e9),
    ],
)
def test_weights_are_those_of_the_model_cards(name: str, weights: float) -> None:
    assert weight_count(find_model(name)) == pytest.approx(weights, rel=0.012)


def test_every_model_of_the_table_has_a_model_card_above() -> None:
    assert len(MODELS) == 10


def test_cache_bytes_of_a_token_by_hand() -> None:
    """Qwen2.5-7B: 2 (key and value) * 28 layers * 4 heads * 128 numbers * 2 bytes = 57,344."""
    model = find_model("7b")
    assert kv_bytes_per_token(model) == 57_344
    assert kv_bytes_per_token(model, tensor_parallel=2) == 28_672
    assert kv_bytes_per_token(model, tensor_parallel=8) == 14_336  # a head on each device, every head twice


def test_a_small_decode_step_reads_all_weights_once() -> None:
    """Qwen2.5-7B on an H100: 7.0706e9 multiplied weights * 2 bytes / 3.35e12 bytes/s = 4.221 ms."""
    costs = roofline("H100", "7b").costs(512)
    assert multiplied_weight_count(find_model("7b")) == pytest.approx(7.0706e9, rel=1e-4)
    assert costs.step(1, 0) == pytest.approx(4.221e-3, rel=1e-3)
    assert costs.step(200, 0) == pytest.approx(4.221e-3, rel=1e-3)


def test_a_large_decode_step_is_bound_by_its_products() -> None:
    """H100: 989.4e12 / 3.35e12 = 295 FLOPs per byte, so more than 295 calls; 512 of them take 7.318 ms."""
    costs = roofline("H100", "7b").costs(512)
    assert costs.step(512, 0) == pytest.approx(512 * 2 * 7.0706e9 / 989.4e12, rel=1e-4)
    assert costs.step(512, 0) == pytest.approx(7.318e-3, rel=1e-3)
    assert costs.prefill_seconds_per_token == pytest.approx(7.318e-3 / 512, rel=1e-3)


def test_context_costs_its_cache_bytes() -> None:
    """64 calls of 8,000 tokens: 512,000 * 57,344 bytes / 3.35e12 bytes/s = 8.764 ms."""
    costs = roofline("H100", "7b").costs(64)
    assert costs.step(64, 512_000) - costs.step(64, 0) == pytest.approx(8.764e-3, rel=1e-3)


def test_the_cache_gets_the_memory_beside_the_weights() -> None:
    """H100: (80e9 - 15.231e9) / 57,344 = 1.1295 million tokens."""
    assert roofline("H100", "7b").cache_tokens(32_768) == pytest.approx(1.1295e6, rel=1e-3)


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel=1: weights of 65\.5 GB do not fit 0\.9 of 1 x 48"):
        roofline("L40S", "32b", efficiencies=Efficiencies())


def test_a_cache_that_holds_no_call_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cache for \d+ tokens, but a call may have 32768"):
        roofline("A100", "32b", efficiencies=Efficiencies()).cache_tokens(32_768)


def test_tensor_parallelism_must_divide_the_heads() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel=8 does not divide the model's 28"):
        roofline("H100", "7b", tensor_parallel=8)


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="gpu=H42: not in the table; known are A100, H100"):
        find_gpu("H42")
    with pytest.raises(ConfigError, match=r"model=no-such: neither .* known are qwen2\.5-0\.5b"):
        find_model("no-such")


def test_models_may_come_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(MODELS["qwen3-8b"])))
    assert find_model(str(tmp_path)) == find_model("8b")
