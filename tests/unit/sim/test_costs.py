"""Costs of engines and of the trainer: rooflines, measured curves, and the passes of a train step."""

import json
import math
from pathlib import Path

import pytest

from rollmesh.errors import ConfigError
from rollmesh.sim.arms import arms_of
from rollmesh.sim.decode_curve import CurvePoint, DecodeCurve, write_curve
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
from rollmesh.sim.simulated_trainer import PartsAhead, TrainerModel

PEAK = Efficiencies(memory=1.0, compute=1.0, step_seconds=0.0, cache_share=1.0)


def roofline(gpu: str, model: str, *, tensor_parallel: int = 1) -> Roofline:
    return Roofline(gpu=find_gpu(gpu), model=find_model(model), tensor_parallel=tensor_parallel, efficiencies=PEAK)


MODEL_CARDS = {
    "qwen2.5-0.5b": 0.49e9,
    "qwen2.5-1.5b": 1.54e9,
    "r1-distill-qwen-1.5b": 1.78e9,
    "qwen2.5-7b": 7.61e9,
    "qwen2.5-14b": 14.7e9,
    "qwen2.5-32b": 32.5e9,
    "qwen3-4b": 4.0e9,
    "qwen3-8b": 8.2e9,
    "qwen3-14b": 14.8e9,
    "qwen3-32b": 32.8e9,
}
"""Weights as the model cards give them."""


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_the_model_cards(name: str) -> None:
    assert weight_count(find_model(name)) == pytest.approx(MODEL_CARDS[name], rel=0.012)


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


ROWS = [(1, 100, 0.011), (1, 300, 0.013), (4, 100, 0.024), (4, 300, 0.032)]
"""base(1) = 0.010, base(4) = 0.020, slope = 1e-5 everywhere."""


def curve(rows: list[tuple[int, int, float]] = ROWS) -> DecodeCurve:
    points = tuple(CurvePoint(running=running, context=context, seconds=seconds) for running, context, seconds in rows)
    return DecodeCurve(points=points, prefill_seconds_per_token=1e-4)


def test_costs_split_a_step_into_base_and_context() -> None:
    costs = curve().costs(4)
    assert costs.step(1, 100) == pytest.approx(0.011)
    assert costs.step(4, 1200) == pytest.approx(0.032)
    assert costs.step(4, 0) == pytest.approx(0.020)
    assert costs.slots == 4


def test_costs_between_measured_numbers_of_calls_are_interpolated() -> None:
    assert curve().costs(4).step(2, 1000) == pytest.approx(0.010 + 0.010 / 3 + 0.01)


def test_a_curve_does_not_say_anything_beyond_its_largest_number_of_calls() -> None:
    with pytest.raises(ConfigError, match="slots=5, but the curve ends at running=4"):
        curve().costs(5)


def test_noise_never_makes_the_base_vanish() -> None:
    costs = curve([(1, 100, 0.010), (1, 300, 0.040)]).costs(1)
    assert costs.base[1] > 0
    assert costs.slope[1] * 100 < 0.010


def test_a_written_curve_reads_as_the_same_curve(tmp_path: Path) -> None:
    write_curve(tmp_path / "curve.json", curve().points, 1e-4, "torch, CPU")
    assert DecodeCurve.read(tmp_path / "curve.json") == curve().model_copy(update={"engine": "torch, CPU"})


@pytest.mark.parametrize(
    ("rows", "prefill", "message"),
    [
        ([(1, 100, 0.01), (4, 100, 0.02)], 0.0, "running=1 was measured at one context"),
        ([*ROWS, (8, 100, 0.05)], 0.0, "running=8 was measured at one context"),
        ([(1, 100, 0.03), (1, 300, 0.01)], 0.0, "running=1, context=300 takes 0.01 s, less than 0.03 s at 100"),
        ([*ROWS, (8, 100, 0.01), (8, 300, 0.032)], 0.0, "context=100, running=8 takes 0.01 s, less than 0.024 s at 4"),
        ([(1, 100, -0.01), (1, 300, 0.01)], 0.0, "points.0.seconds: .* greater than 0"),
        ([(1, 100, 0.01), (1, 300, math.inf)], 0.0, "points.1.seconds: .* finite"),
        ([(0, 100, 0.01), (0, 300, 0.01)], 0.0, "points.0.running: .* greater than or equal to 1"),
        ([], 0.0, "points: .* at least 1 item"),
        (ROWS, -1e-4, "prefill_seconds_per_token: .* greater than or equal to 0"),
    ],
)
def test_unusable_curves_are_refused_with_file_and_place(
    tmp_path: Path, rows: list[tuple[int, int, float]], prefill: float, message: str
) -> None:
    points = [{"running": running, "context": context, "seconds": seconds} for running, context, seconds in rows]
    (tmp_path / "curve.json").write_text(json.dumps({"points": points, "prefill_seconds_per_token": prefill}))
    with pytest.raises(ConfigError, match=rf"curve\.json: no decode curve .*{message}"):
        DecodeCurve.read(tmp_path / "curve.json")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"points": 3, "prefill_seconds_per_token": 0}', "null"])
def test_other_files_are_no_curves(tmp_path: Path, text: str) -> None:
    (tmp_path / "curve.json").write_text(text)
    with pytest.raises(ConfigError, match=r"curve\.json: no decode curve"):
        DecodeCurve.read(tmp_path / "curve.json")


@pytest.mark.parametrize(
    ("preset", "minibatches", "passes"),
    [
        ("copris", 4, 0),  # sampler: the log-probabilities of the engine
        ("areal", 1, 0),  # recompute: the pass of the gradient has them
        ("areal", 4, 1),
        ("april", 4, 0),  # sampler
        ("ulorl", 4, 1),  # current
        ("copris_paper", 1, 1),  # stage_end
    ],
)
def test_one_minibatch_needs_no_pass_of_its_own_for_the_weights_at_the_start_of_the_step(
    preset: str, minibatches: int, passes: int
) -> None:
    overrides = [f"schedule.preset={preset}", f"trainer.minibatches={minibatches}"]
    (arm,) = arms_of(None, overrides, [], [])
    assert arm.settings.trainer.evidence_passes == passes


@pytest.mark.parametrize(
    ("algorithm", "passes"),
    [
        ("old_logprobs: recompute, masks: [icepop]", 1),  # the mask needs them before the gradient
        ("old_logprobs: ewma, masks: [icepop]", 1),
        ("old_logprobs: sampler, masks: [mastered]", 1),
        ("old_logprobs: current, masks: [mastered]", 1),  # one pass for both
        ("old_logprobs: snapshot, masks: [mastered]", 2),
        ("old_logprobs: sampler, kl_coefficient: 0.1", 1),
        ("old_logprobs: ewma, masks: [mastered], kl_coefficient: 0.1", 3),
        (
            "old_logprobs: sampler, advantage: drpo, advantage_options: {longest_tokens: 16000}, "
            "aggregation: sequence_mean_token_mean",
            1,
        ),
        ("old_logprobs: sampler, advantage: tba, advantage_options: {beta: 0.1}, aggregation: token_mean", 2),
    ],
)
def test_masks_and_advantages_and_the_reference_need_passes(algorithm: str, passes: int) -> None:
    (arm,) = arms_of(None, [f"trainer.algorithm={{{algorithm}}}"], [], [])
    assert arm.settings.trainer.evidence_passes == passes


MODEL = TrainerModel(
    fixed_seconds=2.0,
    seconds_per_token=0.01,
    evidence_passes=2,
    evidence_seconds_per_token=0.001,
    publication_seconds=3.0,
)


def test_a_step_pays_for_gradient_and_evidence_of_every_token() -> None:
    """2 + 1000 * (0.01 + 2 * 0.001) = 14 s."""
    assert MODEL.train_seconds(tokens=1000) == pytest.approx(14.0)
    assert MODEL.publish_seconds() == 3.0


def test_a_colocated_trainer_switches_the_devices_twice() -> None:
    model = TrainerModel(fixed_seconds=1.0, seconds_per_token=0.0, colocated=True, switch_seconds=5.0)
    assert (model.train_seconds(tokens=10), model.publish_seconds()) == (6.0, 5.0)


def test_parts_ahead_shorten_the_step_by_their_tokens() -> None:
    """500 tokens take 6 s: ready at 0 they are done at 6, and the rest is 2 + 6 s from the cut at 10 on."""
    parts = PartsAhead(MODEL, now=0.0)
    assert parts.add(0.0, 500) == pytest.approx(6.0)
    assert parts.cut(10.0, tokens=1000) == pytest.approx(18.0)


def test_a_cut_waits_for_the_part_in_progress_and_computes_the_others_itself() -> None:
    parts = PartsAhead(MODEL, now=0.0)
    parts.add(0.0, 500)  # 0 to 6
    parts.add(1.0, 250)  # would begin at 6
    assert parts.cut(4.0, tokens=1000) == pytest.approx(6.0 + 2.0 + 6.0)


def test_the_next_batch_begins_without_parts() -> None:
    parts = PartsAhead(MODEL, now=0.0)
    parts.add(0.0, 500)
    trained = parts.cut(10.0, tokens=1000)
    assert parts.add(trained, 500) == pytest.approx(trained + 6.0)
    assert parts.cut(100.0, tokens=500) == pytest.approx(102.0)


def test_parts_need_devices_of_their_own() -> None:
    with pytest.raises(ConfigError, match="colocated"):
        PartsAhead(TrainerModel(fixed_seconds=1.0, seconds_per_token=0.0, colocated=True), now=0.0)
