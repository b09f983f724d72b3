"""The model of a run: its folder, config and tokenizer, each read once for all checks, and the memory that it needs."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rollmesh.checkpoints.describe import architecture_of, check_weights, read_json
from rollmesh.config import RunConfig
from rollmesh.config.model import AdapterConfig
from rollmesh.config.recipes import resolve_model
from rollmesh.config.teachers import TeacherConfig
from rollmesh.errors import CheckpointError, ConfigError, EngineError
from rollmesh.generator.engines.policy_folders import adapted_layers, read_shapes
from rollmesh.text import Tokenizer

_WEIGHT_AND_GRADIENT = 4 + 4
_MOMENT_BYTES = {"adamw": 8, "adamw_8bit": 2, "adamw_offload": 8}
_AVERAGE_BYTES = 4
_FROZEN_BYTES, _HALF_BYTES = 4, 2
_GPU_GIGABYTES = (24, 80, 141)
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


class RunModel:
    """Model of a run file, read as far as the checks ask."""

    def __init__(self, config: RunConfig) -> None:
        """Find the folder. Raises ConfigError without one, and for one without weights."""
        self.config = config
        self.folder = resolve_model(config.model.path)
        if not any(self.folder.glob("*.safetensors")):
            raise ConfigError(
                f"model.path={config.model.path}: {self.folder} contains no *.safetensors; other formats are not "
                "supported"
            )

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Content of config.json; raises CheckpointError."""
        return read_json(self.folder / "config.json")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer with chat template; raises DataError."""
        return Tokenizer(self.folder)

    def check_template_variables(self) -> None:
        """Raise DataError for a variable that the chat template does not read."""
        self.tokenizer.check_template_variables(self.config.data.chat_template_kwargs, "data.chat_template_kwargs")

    def check_folder(self, engine_check: Callable[[Mapping[str, Any]], None]) -> None:
        """Raise ConfigError for a model that the trainer or the engine cannot load, or with too short a context."""
        path = self.config.model.path
        try:
            engine_check(self.settings)
            architecture_of(self.settings, str(self.folder))
            if self.config.network.shared_folder:  # the pods that load them check them
                check_weights(self.folder)
        except (CheckpointError, EngineError) as error:
            raise ConfigError(f"model.path={path}: {error}") from error
        positions, context = self.settings.get("max_position_embeddings"), self.config.generator.max_context_tokens
        if isinstance(positions, int) and context > positions:
            raise ConfigError(
                f"generator.max_context_tokens={context} is more than the model's max_position_embeddings={positions}"
            )

    def memory(self) -> "ModelMemory":
        """Compute the memory from the headers of the weights and the sizes of the run file.

        Raises ConfigError for a target of the adapter that no layer has.
        """
        config, shape = self.config, architecture_of(self.settings, str(self.folder))
        tensors, element = read_shapes(self.folder), _DTYPE_BYTES[config.model.dtype]
        head_size = int(self.settings.get("head_dim") or shape.hidden_size // shape.head_count)
        average = _AVERAGE_BYTES if config.trainer.algorithm.old_logprobs == "ewma" else 0
        per_token = 2 * shape.layer_count * shape.kv_head_count * head_size * element
        count = trained = sum(map(math.prod, tensors.values()))
        adapter, frozen = config.model.adapter, 0
        if adapter is not None:
            trained = sum(map(math.prod, adapted_layers(tensors, adapter).tensors.values()))
            frozen = _FROZEN_BYTES * count
            alone = config.launcher.least_trainer_processes == 1
            if alone and config.model.dtype == "bfloat16" and config.trainer.device != "cpu":
                # A trainer on one GPU keeps the frozen linear layers in bfloat16.
                layers = adapted_layers(tensors, AdapterConfig()).layers.values()
                frozen -= (_FROZEN_BYTES - _HALF_BYTES) * sum(map(math.prod, layers))
        # The engine "torch" computes logits with a copy of a tied embedding.
        has_copy = "lm_head.weight" not in tensors and config.generator.engine == "torch"
        copied = shape.vocab_size * shape.hidden_size if has_copy else 0
        moments, on_host = _MOMENT_BYTES[config.trainer.optimizer], 0
        if config.trainer.optimizer == "adamw_offload" and config.trainer.device != "cpu":
            moments, on_host = 0, moments
        return ModelMemory(
            parameter_count=count,
            parameter_bytes=_WEIGHT_AND_GRADIENT + moments + average,
            host_bytes=on_host * trained,
            trainer_processes=config.launcher.least_trainer_processes,
            weight_bytes=element * (count + copied),
            cache_bytes=per_token * config.generator.kv_tokens,
            adapter_parameters=None if adapter is None else trained,
            frozen_bytes=frozen,
            first_version_bytes=element * count,
            version_bytes=element * trained,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """Memory that the model needs in each process, without activations."""

    parameter_count: int
    parameter_bytes: int
    """Of the trainer per parameter, shared by the ranks: weight, gradient, moments and the average of ``ewma``."""
    host_bytes: int
    """Moments of the trainer in host memory beside a GPU, shared by the ranks."""
    trainer_processes: int
    weight_bytes: int
    """Of each generator."""
    cache_bytes: int
    """Key-value cache of each generator when it is full."""
    first_version_bytes: int
    """Weights of the first published version."""
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
            f"adapter: {parameters_text(self.adapter_parameters)} are trained ({share:.1%} of the model's); a version "
            f"has {self.version_bytes:,} bytes of weights instead of {self.first_version_bytes:,}"
        )

    def sentence(self) -> str:
        """Describe the memory in one line."""
        host = f" and {_size(self.host_bytes / self.trainer_processes)} in host memory" if self.host_bytes else ""
        shared = f"({self.parameter_bytes} bytes a trained parameter, shared by the ranks){host}"
        return (
            f"model: {parameters_text(self.parameter_count)}; memory without activations: each trainer rank "
            f"{_size(self.trainer_bytes)} {shared}, each generator {_size(self.weight_bytes)} of weights "
            f"and up to {_size(self.cache_bytes)} of cache"
        )

    def largest_models(self) -> str:
        """Name the largest model whose training fits on GPUs of common sizes, in one line.

        An adapter is taken to have the same share of a larger model's parameters.
        """
        per_parameter = self.trainer_bytes * self.trainer_processes / self.parameter_count
        fits = [
            f"{parameters_text(int(size * 10**9 * self.trainer_processes / per_parameter))} in {size} GB"
            for size in _GPU_GIGABYTES
        ]
        ranks = f"{self.trainer_processes} trainer ranks" if self.trainer_processes > 1 else "the trainer"
        return f"without activations {ranks} could train {', '.join(fits)} of GPU memory each (docs/own-model.md)"


def teacher_sentence(field: str, teacher: TeacherConfig, folder: Path) -> str:
    """Describe the weights of a teacher, whose processes hold them alone."""
    count = sum(map(math.prod, read_shapes(folder).values()))
    size = _size(_DTYPE_BYTES[teacher.dtype] * count)
    return f"{field}: {parameters_text(count)}; each of {teacher.replicas} processes {size} of weights"


def parameters_text(count: int) -> str:
    """Format a number of parameters as ``1.5 billion parameters``."""
    for unit, name in ((1_000_000_000, "billion"), (1_000_000, "million")):
        if count >= unit:
            return f"{count / unit:.3g} {name} parameters"
    return f"{count:,} parameters"


def _size(count: float) -> str:
    unit, name = (1e9, "GB") if count >= 1e9 else (1e6, "MB")
    return f"{count / unit:,.1f} {name}"
