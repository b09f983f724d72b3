"""Models that a bench publishes as policies: random models of a given shape, or a model from a folder."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from rollmesh.checkpoints.manifest import CanarySequence
from rollmesh.errors import ConfigError
from rollmesh.trainer.learner.distributed import World
from rollmesh.trainer.learner.forward_backward import Compute
from rollmesh.trainer.learner.packing import PACKED_ATTENTION, register_packed_attention
from rollmesh.trainer.learner.policy_files import PolicyCopy, PolicyOutput, write_weights
from rollmesh.trainer.learner.policy_model import PolicyModel
from rollmesh.trainer.service.published_canary import (
    CANARY_SEQUENCES,
    CANARY_TOKENS,
    canary_count,
    canary_sequences,
    scored_canary,
)

CONTEXT = 256
"""Default number of positions of a random model."""
SMALL: dict[str, Any] = {"hidden_size": 96, "num_hidden_layers": 3, "intermediate_size": 192, "vocab_size": 96}
"""Shape of the demo's model (250,000 parameters, 1 MB)."""
_LARGE_VOCABULARY, _MLP_WIDTHS = 8192, 3
_WIDE_BYTES = 256 << 20
"""Size from which a model has hidden states of 1024 numbers instead of 512."""
_CANARY_SHAPE = (CANARY_SEQUENCES, CANARY_TOKENS)

Policy = tuple[Callable[[Path], Any], Callable[[], list[CanarySequence]]]
"""Functions that write a policy's folder and score its canary."""


class BenchModel(Protocol):
    """Policies of one architecture."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens that prompts may use."""

    @property
    def dtype(self) -> str:
        """Value of ``model.dtype`` of the run."""

    def policy(self, version: int) -> Policy:
        """Return the functions that write one version and score its canary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomModel:
    """Qwen2 model with random float32 weights, different in every version."""

    shape: dict[str, Any]
    """Fields of the model's configuration."""
    dtype: str = "float32"

    @property
    def vocab_size(self) -> int:
        return int(self.shape["vocab_size"])

    def policy(self, version: int) -> Policy:
        model = self._make(version)
        return partial(_write_like_the_trainer, model), partial(_canary, model, self.vocab_size)

    def write(self, folder: Path) -> None:
        """Write the weights of version 0 to a Hugging Face folder."""
        self._make(0).save_pretrained(folder)

    def _make(self, version: int) -> Any:
        return _random_model(self.shape, version)


class UpdatedModel:
    """Qwen2 model whose float32 weights all change in every version, and are copied out as a trainer does.

    One model serves for all versions, because making a large one takes longer than publishing it.
    """

    dtype = "float32"

    def __init__(self, shape: Mapping[str, Any], folder: Path) -> None:
        """Make a random model of these fields of the configuration; its configuration is kept in ``folder``."""
        register_packed_attention()
        causal_lm = _random_model(shape, 0, PACKED_ATTENTION)
        causal_lm.config.architectures = [type(causal_lm).__name__]
        causal_lm.config.save_pretrained(folder)
        self._model = PolicyModel(causal_lm, linear_head=True)
        compute = Compute(
            device=torch.device("cpu"), world=World(), token_budget=CANARY_SEQUENCES * CANARY_TOKENS, autocast=False
        )
        self._output = PolicyOutput(self._model, folder, torch.float32, compute)
        parameter_count = sum(parameter.numel() for parameter in self._model.parameters())
        self._canary = canary_sequences(self.vocab_size, canary_count(parameter_count, compute.device.type))
        self.copies: list[tuple[float, float]] = []
        """Seconds of every policy but the first: copy out, and a plain copy of the same tensors by numpy."""
        self.canaries: list[float] = []
        """Seconds in which the canary of every policy but the first was scored."""

    @classmethod
    def of_size(cls, size_bytes: int, folder: Path) -> Self:
        """Make a model of about this size."""
        hidden = 1024 if size_bytes >= _WIDE_BYTES else 512
        fixed = _LARGE_VOCABULARY * hidden
        per_layer = (2 + 3 * _MLP_WIDTHS) * hidden**2 + 64 * hidden
        shape = {
            "hidden_size": hidden,
            "num_hidden_layers": max(1, round((size_bytes / 4 - fixed) / per_layer)),
            "intermediate_size": _MLP_WIDTHS * hidden,
            "vocab_size": _LARGE_VOCABULARY,
        }
        return cls(shape, folder)

    @property
    def vocab_size(self) -> int:
        return int(self._model.config.vocab_size)

    def policy(self, version: int) -> Policy:
        """Change all weights and copy them out; return the functions that write the copy and score with it."""
        weights = self._model.trained_parameters()
        with torch.no_grad():
            for parameter in weights.values():
                parameter.mul_(1.001)
        started = time.monotonic()
        copied = self._output.copy_out()
        done = time.monotonic()
        for name, weight in weights.items():
            np.copyto(copied.weights[name].numpy(), weight.detach().numpy())
        if version:  # the first copy allocates its memory
            self.copies.append((done - started, time.monotonic() - done))
        return copied.write, partial(self._scored, version, copied)

    def _scored(self, version: int, copied: PolicyCopy) -> list[CanarySequence]:
        assert copied.score is not None, "float32 on a CPU"
        started = time.monotonic()
        logprobs = copied.score(self._canary)
        if version:
            self.canaries.append(time.monotonic() - started)
        return scored_canary(version, self._canary, logprobs)


class SavedModel:
    """Model from a Hugging Face folder, with equal weights in every version."""

    def __init__(self, folder: Path, longest: int) -> None:
        """Read the configuration. Raises ConfigError unless the folder has a model for ``longest`` tokens."""
        try:
            config = json.loads((folder / "config.json").read_text())
            self._vocab_size, positions = int(config["vocab_size"]), int(config["max_position_embeddings"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"--model {folder}: expected a Hugging Face folder: {error!r}") from error
        if positions < longest:
            raise ConfigError(f"--model {folder}: max_position_embeddings={positions}, the bench needs {longest}")
        stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        self._folder, self._dtype = folder, "float32" if stored == "float32" else "bfloat16"
        self._canary: list[CanarySequence] = []

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def dtype(self) -> str:
        """Data type of the run: float32 if the folder has it, else bfloat16."""
        return self._dtype

    def policy(self, version: int) -> Policy:
        """Return the functions that copy the folder and return its canary, which is computed once, in float32."""
        if not self._canary:
            from transformers import AutoModelForCausalLM

            _disable_progress_bars()
            model: Any = AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32)
            self._canary = _canary(model, self._vocab_size)
        return self._copy, lambda: self._canary

    def _copy(self, target: Path) -> None:
        for file in (*self._folder.glob("*.json"), *self._folder.glob("*.safetensors")):
            shutil.copyfile(file, target / file.name)


def _random_model(shape: Mapping[str, Any], seed: int, attention: str = "sdpa") -> Any:
    from transformers import AutoModelForCausalLM, Qwen2Config

    _disable_progress_bars()
    torch.manual_seed(seed)
    heads = {"num_attention_heads": shape["hidden_size"] // 32, "num_key_value_heads": 1}
    fields = {"max_position_embeddings": CONTEXT, "tie_word_embeddings": True, **heads, **shape}
    auto: Any = AutoModelForCausalLM
    return auto.from_config(Qwen2Config(**fields), attn_implementation=attention)


def _write_like_the_trainer(model: Any, folder: Path) -> dict[str, str]:
    """Write the folder and return the digests of the weights, as a trainer does."""
    return _write_weights(model, {name: parameter.detach() for name, parameter in model.named_parameters()}, folder)


def _write_weights(model: Any, weights: Mapping[str, Tensor], folder: Path) -> dict[str, str]:
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return write_weights(folder, weights)


def _canary(model: Any, vocab_size: int) -> list[CanarySequence]:
    ids = torch.randint(0, vocab_size, _CANARY_SHAPE, generator=torch.Generator().manual_seed(0))
    rows = zip(ids.tolist(), token_logprobs(model.eval(), ids).tolist(), strict=True)
    return [CanarySequence(token_ids=tokens, logprobs=logprobs) for tokens, logprobs in rows]


def token_logprobs(model: Any, ids: Tensor) -> Tensor:
    """Return the log-probability of every token after the first, [rows, tokens - 1], by a plain forward pass."""
    with torch.inference_mode():
        logprobs: Tensor = model(ids).logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)
    return logprobs


def _disable_progress_bars() -> None:
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
