"""Published speed-ups with their set-ups: the measure of the simulator's predictions.

A field is None where no source states it. ``ASSUMPTIONS`` fills some of the gaps, with the same values in every row;
none of them is fitted to a row. Every row says how well it is known (``Evidence``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from rollmesh.errors import ConfigError
from rollmesh.sim.roofline import Efficiencies


class Evidence(StrEnum):
    """Origin of a published figure, from the most to the least certain."""

    PAPER = "paper"
    """Read in the paper's text, or in the documentation of the authors' code."""
    FIGURE = "figure"
    """Read off a figure that the authors publish."""
    NOTES = "notes"
    """From public notes about the paper; not compared with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSpeedUp:
    """Speed-up of a system over a baseline, with the set-up of the experiment."""

    system: str
    preset: str
    """Preset of ``schedule.preset`` that has the system's schedule."""
    baseline: str
    baseline_preset: str = "sync"
    quantity: str = "time per update"
    speed_up: float
    evidence: Evidence
    source: str
    model: str | None = None
    """Name in ``sim.model_sizes``."""
    gpu: str | None = None
    generator_gpus: int | None = None
    """GPUs of the generators; with ``trainer_gpus`` 0 the trainer shares them."""
    trainer_gpus: int | None = None
    groups_per_batch: int | None = None
    group_size: int | None = None
    prompt_tokens: int | None = None
    """Most tokens of a prompt."""
    response_tokens: int | None = None
    """Most tokens of a response."""
    pool_size: int | None = None
    window_groups: float | None = None
    """Most groups admitted and not consumed, in batches."""
    remark: str = ""

    @property
    def missing(self) -> tuple[str, ...]:
        """Fields without which no assumption makes the row predictable."""
        needed = ("model", "generator_gpus", "trainer_gpus", "groups_per_batch", "group_size", "response_tokens")
        return tuple(name for name in needed if getattr(self, name) is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Constants of every prediction that no source of a row states."""

    gpu: str = "H800"
    """Where a source names no GPU: most rows that name one have it."""
    prompt_tokens: int = 256
    """Mean tokens of a prompt; math and code prompts in public traces have 161 to 485."""
    slots: int = 256
    """Running calls of one generator: so many that its cache is the bound."""
    fixed_seconds: float = 5.0
    """Of a train step: optimizer, data, records."""
    publication_seconds: float = 5.0
    """From new weights to generators that serve them; verl's documentation has 4 to 16 s for 30B."""
    switch_seconds: float = 10.0
    """Colocated: to hand the devices over, once in each direction."""
    reward_seconds: float = 1.0
    """Median time to score an answer, with as many workers as answers in a batch."""
    efficiencies: Efficiencies = field(default_factory=Efficiencies)


ASSUMPTIONS = Assumptions()


def _copris(model: str, sync_hours: float, hours: float) -> PublishedSpeedUp:
    return PublishedSpeedUp(
        system="CoPRIS",
        preset="copris_paper",
        baseline="veRL, synchronous",
        speed_up=sync_hours / hours,
        evidence=Evidence.FIGURE,
        source="arXiv 2511.05589, main results; set-up of the public script run_CoPRIS.sh",
        model=model,
        generator_gpus=16,
        trainer_gpus=0,
        groups_per_batch=64,
        group_size=8,
        prompt_tokens=1024,
        response_tokens=15_360,
        pool_size=1024,
        remark=f"{sync_hours} h and {hours} h; the script's settings are assumed for every model",
    )


def _areal(baseline: str, hours: float) -> PublishedSpeedUp:
    return PublishedSpeedUp(
        system="AReaL",
        preset="areal",
        baseline=baseline,
        speed_up=hours / 14.8,
        evidence=Evidence.PAPER,
        source="arXiv 2505.24298, 1.5B math: 14.8 h for 250 steps; hyperparameters of its table 3",
        model="r1-distill-qwen-1.5b",
        gpu="H800",
        generator_gpus=96,
        trainer_gpus=32,
        groups_per_batch=512,
        group_size=16,
        prompt_tokens=1024,
        response_tokens=27_648,
        window_groups=9.0,
        remark="staleness bound 8; the baseline has all 128 GPUs for both",
    )


def _april(model: str, data: str, speed_up: float, evidence: Evidence) -> PublishedSpeedUp:
    return PublishedSpeedUp(
        system="APRIL",
        preset="april",
        baseline=f"slime, synchronous, {data}",
        quantity="rollout throughput",
        speed_up=speed_up,
        evidence=evidence,
        source="README of RLsys-Foundation/APRIL" if evidence is Evidence.PAPER else "arXiv 2509.18521v1, GRPO",
        model=model,
        gpu="H100",
        generator_gpus=8,
        trainer_gpus=0,
        groups_per_batch=32,
        group_size=8,
        response_tokens=16_384,
        pool_size=512,
    )


def _rollpacker(model: str, gpus: int, response_tokens: int, speed_up: float) -> PublishedSpeedUp:
    return PublishedSpeedUp(
        system="RollPacker",
        preset="rollpacker",
        baseline="veRL, synchronous",
        speed_up=speed_up,
        evidence=Evidence.PAPER,
        source="arXiv 2509.21009, cumulative ablation: tail batching alone",
        model=model,
        gpu="H800",
        generator_gpus=gpus,
        trainer_gpus=0,
        groups_per_batch=128,
        group_size=8,
        response_tokens=response_tokens,
        pool_size=1600,
        window_groups=1.25,
        remark="the paper's planners for reward time, parallelism and streamed training are not in this figure",
    )


def _rollart(baseline: str, baseline_preset: str, speed_up: float) -> PublishedSpeedUp:
    return PublishedSpeedUp(
        system="RollArt",
        preset="roll",
        baseline=baseline,
        baseline_preset=baseline_preset,
        speed_up=speed_up,
        evidence=Evidence.PAPER,
        source="arXiv 2512.22560, step time",
        gpu="H800",
        groups_per_batch=64,
        group_size=8,
        response_tokens=32_768,
        remark="96 H800 and 32 H20, Qwen3 8B to 32B, batch 512; which model and which split per figure is not known",
    )


def _verl(staleness: float, hours: float) -> PublishedSpeedUp:
    return PublishedSpeedUp(
        system="verl fully async",
        preset="copris",
        baseline="the same with staleness 0",
        speed_up=(25 + 53 / 60) / hours,
        evidence=Evidence.PAPER,
        source="documentation of verl's fully_async_policy recipe, 400 steps of Qwen2.5-Math-7B on 128 H20",
        model="qwen2.5-7b",
        gpu="H20",
        generator_gpus=64,
        trainer_gpus=64,
        window_groups=1 + staleness,
        remark=f"staleness threshold {staleness}; batch and lengths are not known",
    )


PUBLISHED: tuple[PublishedSpeedUp, ...] = (
    _copris("r1-distill-qwen-1.5b", 54.05, 34.20),
    _copris("qwen2.5-7b", 43.57, 22.44),
    _copris("qwen3-8b", 54.42, 31.16),
    _areal("veRL, synchronous", 33.6),
    _areal("AReaL, synchronous", 41.0),
    _april("qwen3-4b", "DAPO-17k", 1.17, Evidence.PAPER),
    _april("qwen3-4b", "DeepScaleR", 1.21, Evidence.PAPER),
    _april("qwen3-4b", "DeepMath", 1.35, Evidence.PAPER),
    _april("qwen3-8b", "DAPO-17k", 1.26, Evidence.NOTES),
    _april("qwen3-8b", "DeepScaleR", 1.35, Evidence.NOTES),
    _april("qwen3-8b", "DeepMath", 1.44, Evidence.NOTES),
    _rollpacker("qwen2.5-7b", 16, 8192, 1.30),
    _rollpacker("qwen2.5-14b", 32, 16_384, 1.48),
    _rollpacker("qwen2.5-32b", 64, 32_768, 2.21),
    PublishedSpeedUp(
        system="StreamRL",
        preset="streamrl",
        baseline="the best of the compared systems",
        speed_up=1.08 * 1.15 * 1.25,
        evidence=Evidence.NOTES,
        source="arXiv 2504.15930, ablation: product of skewness 8%, streaming 15%, one step of overlap 25%",
        remark="Qwen2.5 7B to 72B, 5k to 20k tokens, up to 2.66; the set-up per figure is not known",
    ),
    _rollart("ROLL, synchronous, improved", "sync", 2.05),
    _rollart("ROLL, one step off", "one_step_off", 1.35),
    _rollart("AReaL", "areal", 1.31),
    _verl(0.1, 19 + 59 / 60),
    _verl(0.3, 17 + 20 / 60),
    _verl(0.5, 17 + 22 / 60),
)


def leave_one_out(speed_ups: Sequence[float]) -> list[float]:
    """Predict each value as the geometric mean of the others. Raises ConfigError for fewer than two."""
    if len(speed_ups) < 2:
        raise ConfigError(f"leave_one_out: {len(speed_ups)} rows; it needs at least 2")
    logs = [math.log(value) for value in speed_ups]
    total = sum(logs)
    return [math.exp((total - own) / (len(logs) - 1)) for own in logs]


def log_error(predicted: Sequence[float], published: Sequence[float]) -> float:
    """Return the mean of abs(ln(predicted / published)), 0 for perfect predictions."""
    pairs = list(zip(predicted, published, strict=True))
    return sum(abs(math.log(ours / theirs)) for ours, theirs in pairs) / len(pairs)
