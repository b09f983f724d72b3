"""Published speed-ups with their set-ups: the measure of the simulator's predictions.

``Evidence`` says how certain a figure is. A set-up has what the sources state; ``predictions`` fills its gaps, with the
same constants in every row. A row without a set-up is listed with what is missing, and not predicted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

_RECOMPUTE = "trainer.algorithm.old_logprobs=recompute"
_CURRENT = "trainer.algorithm.old_logprobs=current"
_VERL_SOURCE = "verl's documentation of the fully asynchronous trainer, 400 steps of Qwen2.5-Math-7B"
_RHYME_SOURCE = "arXiv 2508.18588; README of the recipe specRL for verl"
_NO_STREAMING = "verl trains on quarters of a batch; our presets that admit more than a batch do not"


class Evidence(StrEnum):
    """Origin of a published figure, the most certain first."""

    TEXT = "text"
    """Read in the text of the paper, or in the documentation of the authors' code."""
    FIGURE = "figure"
    """Read off a figure that the authors publish."""
    NOTES = "notes"
    """From public notes about the paper; not compared with the paper."""


class Quantity(StrEnum):
    """Quantity whose ratio is published."""

    TIME = "time per update"
    ROLLOUT = "rollout throughput"
    """Trained tokens per second in which the trainer waits for a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedArm:
    """Schedule and GPUs of the method or of its baseline."""

    preset: str
    generator_gpus: int
    trainer_gpus: int = 0
    """0: the trainer shares the GPUs of the generators."""
    window_batches: float | None = None
    """Most groups admitted and not consumed, in batches; None for the preset's."""
    settings: tuple[str, ...] = ()
    """Further fields of the run file."""
    drafts: str = ""
    """Rule of ``sim.simulated_drafts``; empty without speculative decoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSetup:
    """Set-up of an experiment."""

    model: str
    """Name in ``sim.roofline.MODELS``."""
    gpu: str | None
    """GPU that the source names; None if it names none."""
    groups_per_batch: int
    group_size: int
    response_tokens: int
    """Most tokens of a response."""
    is_base: bool = False
    """True for a base model, False for a reasoning model."""
    optimizer_steps: int = 1
    """Optimizer steps of a batch."""
    method: PublishedArm
    baseline: PublishedArm


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSpeedUp:
    """Speed-up of a method over a baseline."""

    system: str
    row: str
    """Name of the row among those of the system."""
    baseline: str
    speed_up: float
    quantity: Quantity = Quantity.TIME
    evidence: Evidence
    source: str
    setup: PublishedSetup | None
    remark: str
    """Gaps and deviations of the set-up; without a set-up, what is missing."""
    is_in_bar: bool = True
    """True for the rows that the bar was set for; the others are predicted beside them."""

    @property
    def name(self) -> str:
        """Return the name of the row."""
        return f"{self.system}, {self.row}"


def _synchronous(gpus: int) -> PublishedArm:
    """Return the baseline of most rows: shared GPUs, old logprobs computed by the trainer."""
    return PublishedArm(preset="sync", generator_gpus=gpus, settings=(_RECOMPUTE,))


def _copris() -> Iterator[PublishedSpeedUp]:
    rows = (
        ("R1-Distill-1.5B", "r1-distill-qwen-1.5b", 54.05, 34.20),
        ("R1-Distill-7B", "r1-distill-qwen-7b", 43.57, 22.44),
        ("Qwen3-8B", "qwen3-8b", 54.42, 31.16),
    )
    for row, model, hours_before, hours in rows:
        yield PublishedSpeedUp(
            system="CoPRIS",
            row=row,
            baseline="veRL, synchronous",
            speed_up=hours_before / hours,
            evidence=Evidence.FIGURE,
            source="arXiv 2511.05589, main results; set-up of the public script run_CoPRIS.sh",
            setup=PublishedSetup(
                model=model,
                gpu=None,
                groups_per_batch=64,
                group_size=8,
                response_tokens=15_360,
                method=PublishedArm(preset="copris_paper", generator_gpus=16),
                baseline=_synchronous(16),
            ),
            remark="the script's settings are assumed for every model",
        )


def _areal() -> Iterator[PublishedSpeedUp]:
    rows = (
        ("over veRL", "veRL, synchronous", 33.6),
        ("over synchronous AReaL", "AReaL, synchronous", 41.0),
    )
    for row, baseline, hours in rows:
        yield PublishedSpeedUp(
            system="AReaL",
            row=row,
            baseline=baseline,
            speed_up=hours / 14.8,
            evidence=Evidence.TEXT,
            source="arXiv 2505.24298, 250 steps of 1.5B math on 16 nodes; hyperparameters of its table 3",
            setup=PublishedSetup(
                model="r1-distill-qwen-1.5b",
                gpu="H800",
                groups_per_batch=512,
                group_size=16,
                response_tokens=27_648,
                optimizer_steps=4,
                method=PublishedArm(
                    preset="areal", generator_gpus=96, trainer_gpus=32, settings=("schedule.max_staleness=8",)
                ),
                baseline=_synchronous(128),
            ),
            remark="nothing in the simulator tells the two baselines apart",
        )


def _april() -> Iterator[PublishedSpeedUp]:
    readme = "README of RLsys-Foundation/APRIL for 4B, where the paper's v1 has 1.24, 1.31 and 1.35"
    sources = (
        ("4B", "qwen3-4b", Evidence.TEXT, readme, (1.17, 1.21, 1.35)),
        ("8B", "qwen3-8b", Evidence.NOTES, "arXiv 2509.18521v1, GRPO", (1.26, 1.35, 1.44)),
    )
    for size, model, evidence, source, speed_ups in sources:
        for data, speed_up in zip(("DAPO-17k", "DeepScaleR", "DeepMath"), speed_ups, strict=True):
            yield PublishedSpeedUp(
                system="APRIL",
                row=f"{size}, {data}",
                baseline="slime, synchronous",
                speed_up=speed_up,
                quantity=Quantity.ROLLOUT,
                evidence=evidence,
                source=source,
                setup=PublishedSetup(
                    model=model,
                    gpu="H100",
                    groups_per_batch=32,
                    group_size=8,
                    response_tokens=16_384,
                    method=PublishedArm(preset="april", generator_gpus=8, settings=(_CURRENT,)),
                    baseline=_synchronous(8),
                ),
                remark="nothing in the simulator tells the data sets apart",
            )


def _rollpacker() -> Iterator[PublishedSpeedUp]:
    rows = (
        ("7B, 8k", "7b", 16, 8192, 1.30),
        ("14B, 16k", "14b", 32, 16_384, 1.48),
        ("32B, 32k", "32b", 64, 32_768, 2.21),
    )
    for row, model, gpus, tokens, speed_up in rows:
        yield PublishedSpeedUp(
            system="RollPacker",
            row=row,
            baseline="veRL, synchronous",
            speed_up=speed_up,
            evidence=Evidence.TEXT,
            source="arXiv 2509.21009, cumulative ablation: tail batching alone",
            setup=PublishedSetup(
                model=f"qwen2.5-{model}",
                gpu="H800",
                groups_per_batch=128,
                group_size=8,
                response_tokens=tokens,
                is_base=True,
                method=PublishedArm(preset="rollpacker", generator_gpus=gpus, settings=(_RECOMPUTE,)),
                baseline=_synchronous(gpus),
            ),
            remark="the seconds of the paper's rewards (code, a judge) are not known",
        )


def _verl_setup(method: PublishedArm, baseline: PublishedArm) -> PublishedSetup:
    return PublishedSetup(
        model="qwen2.5-7b",
        gpu="H20",
        groups_per_batch=512,
        group_size=16,
        response_tokens=28_672,
        is_base=True,
        optimizer_steps=16,
        method=method,
        baseline=baseline,
    )


def _verl_asynchronous(gpus: int, staleness: float) -> PublishedArm:
    """Return the fully asynchronous mode: half of the GPUs for each side, partial rollouts, (1 + staleness) batches."""
    return PublishedArm(
        preset="pipeline",
        generator_gpus=gpus // 2,
        trainer_gpus=gpus // 2,
        window_batches=1 + staleness,
        settings=("generator.on_new_version=interrupt",),
    )


def _verl_staleness() -> Iterator[PublishedSpeedUp]:
    before = 25 * 60 + 53
    for staleness, minutes in ((0.1, 19 * 60 + 59), (0.3, 17 * 60 + 20), (0.5, 17 * 60 + 22)):
        yield PublishedSpeedUp(
            system="verl staleness",
            row=f"{staleness:g}",
            baseline="staleness 0",
            speed_up=before / minutes,
            evidence=Evidence.TEXT,
            source=f"{_VERL_SOURCE}, 64 + 64 H20",
            setup=_verl_setup(
                _verl_asynchronous(128, staleness), PublishedArm(preset="sync", generator_gpus=64, trainer_gpus=64)
            ),
            remark=f"{_NO_STREAMING}, so neither arm does here",
        )


def _verl_gpus() -> Iterator[PublishedSpeedUp]:
    for gpus, before, minutes in (
        (32, 89 * 60 + 5, 33 * 60 + 26),
        (64, 41 * 60 + 32, 21 * 60 + 40),
        (128, 40 * 60 + 48, 17 * 60 + 22),
    ):
        yield PublishedSpeedUp(
            system="verl asynchronous",
            row=f"{gpus} GPUs",
            baseline="verl, synchronous",
            speed_up=before / minutes,
            evidence=Evidence.TEXT,
            source=f"{_VERL_SOURCE}, staleness 0.5",
            setup=_verl_setup(_verl_asynchronous(gpus, 0.5), _synchronous(gpus)),
            remark=_NO_STREAMING,
            is_in_bar=False,
        )


def _speculation(rule: str, model: str, gpus: int, groups: int, members: int, tokens: int) -> PublishedSetup:
    """Return a synchronous run with and without drafts."""
    return PublishedSetup(
        model=model,
        gpu="H100",
        groups_per_batch=groups,
        group_size=members,
        response_tokens=tokens,
        is_base=rule == "rhyme",
        method=PublishedArm(preset="sync", generator_gpus=gpus, settings=(_RECOMPUTE,), drafts=rule),
        baseline=_synchronous(gpus),
    )


def _drafts() -> Iterator[PublishedSpeedUp]:
    rhyme = (Evidence.TEXT, _RHYME_SOURCE, "the README says up to 2.1")
    das = (
        Evidence.NOTES,
        "arXiv 2511.13841",
        "rollout time is less by more than 50%, more than 30% and about 25%; 8 answers to a prompt are assumed, and a "
        "cap of 16,384 where none is named",
    )
    rows = (
        ("RhymeRL", "HistoSpec, 14B", 2.1, rhyme, _speculation("rhyme", "qwen3-14b", 32, 256, 16, 8192)),
        ("DAS", "math, 7B", 1 / 0.5, das, _speculation("das", "r1-distill-qwen-7b", 8, 128, 8, 16_384)),
        ("DAS", "math, 7B, 8k", 1 / 0.7, das, _speculation("das", "r1-distill-qwen-7b", 8, 128, 8, 8192)),
        ("DAS", "code, 8B", 1 / 0.75, das, _speculation("das", "qwen3-8b", 8, 128, 8, 16_384)),
    )
    for system, row, speed_up, (evidence, source, remark), setup in rows:
        yield PublishedSpeedUp(
            system=system,
            row=row,
            baseline="verl, without drafts",
            speed_up=speed_up,
            quantity=Quantity.ROLLOUT,
            evidence=evidence,
            source=source,
            setup=setup,
            remark=remark,
            is_in_bar=False,
        )


def _unknown() -> Iterator[PublishedSpeedUp]:
    rows = (
        ("StreamRL", "ablation", "its own synchronous form", 1.08 * 1.15 * 1.25, Evidence.NOTES, "arXiv 2504.15930"),
        ("StreamRL", "largest", "the best compared system", 2.66, Evidence.NOTES, "arXiv 2504.15930"),
        ("RhymeRL", "end to end", "veRL", 2.6, Evidence.NOTES, _RHYME_SOURCE),
        ("RollArt", "over Sync+", "ROLL, synchronous, improved", 2.05, Evidence.TEXT, "arXiv 2512.22560"),
        ("RollArt", "over one step off", "ROLL, one step off", 1.35, Evidence.TEXT, "arXiv 2512.22560"),
        ("RollArt", "over AReaL", "AReaL", 1.31, Evidence.TEXT, "arXiv 2512.22560"),
    )
    missing = {
        "RhymeRL": "end to end: model, GPUs and batch are not known, and HistoPipe is not simulated",
        "StreamRL": "7B to 72B, 5k to 20k tokens: model, GPUs and batch of each figure are not known",
        "RollArt": "8B to 32B on 96 H800 and 32 H20: model, split and seconds of the environments are not known",
    }
    for system, row, baseline, speed_up, evidence, source in rows:
        yield PublishedSpeedUp(
            system=system,
            row=row,
            baseline=baseline,
            speed_up=speed_up,
            evidence=evidence,
            source=source,
            setup=None,
            remark=missing[system],
        )


def published_speed_ups() -> tuple[PublishedSpeedUp, ...]:
    """Return all rows; those without a set-up last."""
    known = (_copris(), _areal(), _april(), _rollpacker(), _verl_staleness(), _verl_gpus(), _drafts())
    return tuple(row for rows in (*known, _unknown()) for row in rows)
