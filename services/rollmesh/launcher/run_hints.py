"""Memory of a run's model, and hints for values that do not fit the model or the data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rollmesh.checkpoints.describe import describe_folder, read_json
from rollmesh.config import RunConfig
from rollmesh.config.adapter import AdapterConfig
from rollmesh.config.data import JsonlSource
from rollmesh.config.recipes import resolve_model
from rollmesh.generator.engines.policy_folders import adapted_layers, read_shapes
from rollmesh.scheduling import Schedule

_WEIGHT_AND_GRADIENT = 4 + 4
_MOMENT_BYTES = {"adamw": 8, "adamw_8bit": 2}
_AVERAGE_BYTES = 4
_FROZEN_BYTES, _HALF_BYTES = 4, 2
_GPU_GIGABYTES = (24, 80, 141)
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_SMALL_MODEL = 10_000_000
_LOW_RATE = 1e-5
_HIGH_RATE = 0.02
_SMALL_MODEL_RATE = 1e-4
_COARSE_ERROR = 0.1
_CLIPS_THE_RATIO = ("ppo_clip", "decoupled_ppo", "tis", "gspo")
_READ_TABLE_BYTES = 256 << 20
"""Size up to which a table is read to count its rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """Memory that the model needs in each process, without activations."""

    parameter_count: int
    parameter_bytes: int
    """Of the trainer per parameter, shared by the ranks: weight, gradient, moments and the average of ``ewma``."""
    trainer_processes: int
    weight_bytes: int
    """Of each generator."""
    cache_bytes: int
    """Key-value cache of each generator when it is full."""
    adapter_parameters: int | None = None
    """Trained parameters, if they are those of an adapter."""
    frozen_bytes: int = 0
    """Frozen weights below an adapter, shared by the ranks of the trainer."""
    version_bytes: int = 0
    """Weights of a published version after the first one."""

    @property
    def trainer_bytes(self) -> int:
        """Bytes of each trainer rank."""
        trained = self.parameter_count if self.adapter_parameters is None else self.adapter_parameters
        return (self.parameter_bytes * trained + self.frozen_bytes) // self.trainer_processes

    def adapter_sentence(self) -> str:
        """Describe what is trained and published, in one line; empty for full weights."""
        if self.adapter_parameters is None:
            return ""
        share = self.adapter_parameters / self.parameter_count
        return (
            f"adapter: {_parameters(self.adapter_parameters)} are trained ({share:.1%} of the model's); a version has "
            f"{self.version_bytes:,} bytes of weights instead of {self.weight_bytes:,}"
        )

    def sentence(self) -> str:
        """Describe the memory in one line."""
        return (
            f"model: {_parameters(self.parameter_count)}; memory without activations: each trainer rank "
            f"{_size(self.trainer_bytes)} ({self.parameter_bytes} bytes a trained parameter, shared by the ranks), "
            f"each generator {_size(self.weight_bytes)} of weights and up to {_size(self.cache_bytes)} of cache"
        )

    def largest_models(self) -> str:
        """Name the largest model whose training fits on GPUs of common sizes, in one line.

        An adapter is taken to have the same share of a larger model's parameters.
        """
        per_parameter = self.trainer_bytes * self.trainer_processes / self.parameter_count
        fits = [
            f"{_parameters(int(size * 10**9 * self.trainer_processes / per_parameter))} in {size} GB"
            for size in _GPU_GIGABYTES
        ]
        ranks = f"{self.trainer_processes} trainer ranks" if self.trainer_processes > 1 else "the trainer"
        return f"without activations {ranks} could train {', '.join(fits)} of GPU memory each (docs/performance.md)"


def model_memory(config: RunConfig) -> ModelMemory:
    """Compute the memory from the headers of the weights and the sizes of the run file.

    Raises ConfigError for a target of the adapter that no layer has.
    """
    folder = resolve_model(config.model.path)
    described, raw = describe_folder(folder), read_json(folder / "config.json")
    shape, element = described.architecture, _DTYPE_BYTES[config.model.dtype]
    head_size = int(raw.get("head_dim") or shape.hidden_size // shape.head_count)
    average = _AVERAGE_BYTES if config.trainer.algorithm.old_logprobs == "ewma" else 0
    per_token = 2 * shape.layer_count * shape.kv_head_count * head_size * element
    adapter, trained, frozen = config.model.adapter, described.parameter_count, 0
    if adapter is not None:
        tensors = read_shapes(folder)
        trained = sum(map(math.prod, adapted_layers(tensors, adapter).tensors.values()))
        frozen = _FROZEN_BYTES * described.parameter_count
        if _halves_base(config):
            layers = adapted_layers(tensors, AdapterConfig()).layers.values()
            frozen -= (_FROZEN_BYTES - _HALF_BYTES) * sum(map(math.prod, layers))
    return ModelMemory(
        parameter_count=described.parameter_count,
        parameter_bytes=_WEIGHT_AND_GRADIENT + _MOMENT_BYTES[config.trainer.optimizer] + average,
        trainer_processes=config.launcher.trainer_processes,
        weight_bytes=element * described.parameter_count,
        cache_bytes=per_token * config.generator.kv_tokens,
        adapter_parameters=None if adapter is None else trained,
        frozen_bytes=frozen,
        version_bytes=element * trained,
    )


def _halves_base(config: RunConfig) -> bool:
    """Tell whether a trainer on a GPU keeps the frozen linear layers in bfloat16."""
    alone = config.launcher.trainer_processes == 1
    return alone and config.model.dtype == "bfloat16" and config.trainer.device != "cpu"


def run_hints(config: RunConfig, parameter_count: int) -> list[str]:
    """Return hints for valid values that are unlikely to be meant."""
    hints = (
        *_rate_hints(config, parameter_count),
        *_step_hints(config),
        *_clip_hints(config),
        *_evaluation_hints(config),
    )
    return [f"hint: {text}" for text in hints]


def _rate_hints(config: RunConfig, parameter_count: int) -> Iterator[str]:
    rate = config.trainer.learning_rate
    if rate > _HIGH_RATE:
        yield (
            f"trainer.learning_rate={rate:g} is far above what AdamW takes (1e-6 for large models, 1e-3 for an adapter "
            "or a small one): the policy will diverge in its first updates"
        )
    if parameter_count < _SMALL_MODEL and rate < _LOW_RATE:
        yield (
            f"trainer.learning_rate={rate:g} suits models of a billion parameters; one of "
            f"{_parameters(parameter_count)} hardly changes: try {_SMALL_MODEL_RATE:g}"
        )


def _step_hints(config: RunConfig) -> Iterator[str]:
    trainer, reference = config.trainer, config.trainer.algorithm.kl_reference_version
    if trainer.warmup_steps >= trainer.train_steps:
        yield (
            f"trainer.warmup_steps={trainer.warmup_steps} with trainer.train_steps={trainer.train_steps}: the learning "
            "rate never reaches trainer.learning_rate; lower trainer.warmup_steps"
        )
    if reference and not (Path(config.folder) / "config.yaml").exists():
        yield (
            f"trainer.algorithm.kl_reference_version={reference}: a new run has version 0 only, and a trainer "
            "that needs a reference refuses another one; set 0, and change it once that version is published"
        )


def _clip_hints(config: RunConfig) -> Iterator[str]:
    """Name a clip that cannot act. In the demo a run without one collapsed (docs/experiments.md)."""
    algorithm, staleness = config.trainer.algorithm, Schedule.from_config(config).max_staleness
    of_the_step = algorithm.old_logprobs in ("recompute", "current") and config.trainer.minibatches == 1
    if of_the_step and staleness and algorithm.loss in _CLIPS_THE_RATIO:
        yield (
            f"trainer.algorithm.old_logprobs={algorithm.old_logprobs} with trainer.minibatches=1: pi_old is the policy "
            f"itself, so {algorithm.loss} never clips, on tokens up to {staleness} train steps old; raise "
            "trainer.minibatches, or use old_logprobs=snapshot (loss ppo_clip: or sampler)"
        )


def _evaluation_hints(config: RunConfig) -> Iterator[str]:
    evaluation = config.evaluation
    if not (evaluation.before_and_after or evaluation.every_versions):
        return
    prompts = evaluation.prompt_count
    existing = _evaluation_rows(config)
    if existing is not None and existing < prompts:
        yield (
            f"evaluation.prompt_count={prompts}: the evaluation split has about {existing} prompts; add rows, raise "
            f"data.held_out_ratio={config.data.held_out_ratio:g}, or set data.evaluation_source"
        )
        prompts = existing
    if evaluation.temperature == 0 and evaluation.samples_per_prompt > 1:
        yield (
            f"evaluation.samples_per_prompt={evaluation.samples_per_prompt} with evaluation.temperature=0: greedy "
            "answers to one prompt are the same; set samples_per_prompt=1, or a temperature"
        )
    error = 0.5 / math.sqrt(prompts)
    if error > _COARSE_ERROR:
        yield (
            f"an accuracy over {prompts} prompts has a standard error of up to {error:.2f}; 256 prompts have 0.03: "
            "raise evaluation.prompt_count"
        )


def _evaluation_rows(config: RunConfig) -> int | None:
    """Return the number of rows of the evaluation split of a table; None for other sources and large tables."""
    data = config.data
    source = data.evaluation_source or data.source
    if type(source) is not JsonlSource or Path(source.path).stat().st_size > _READ_TABLE_BYTES:
        return None
    with Path(source.path).open("rb") as file:
        rows = sum(1 for line in file if line.strip())
    if data.evaluation_source is not None or data.held_out_ratio == 0:
        return rows
    return min(max(1, round(data.held_out_ratio * rows)), max(1, rows - 1))


def _parameters(count: int) -> str:
    """Format a number of parameters as ``1.5 billion parameters``."""
    for unit, name in ((1_000_000_000, "billion"), (1_000_000, "million")):
        if count >= unit:
            return f"{count / unit:.3g} {name} parameters"
    return f"{count:,} parameters"


def _size(count: float) -> str:
    """Format bytes as ``9.6 GB``."""
    unit, name = (1e9, "GB") if count >= 1e9 else (1e6, "MB")
    return f"{count / unit:,.1f} {name}"
