"""Models of benches: random ones of a given shape, and the policies that a trainer publishes of a model."""

import json
import statistics
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollmesh.checkpoints.manifest import CanarySequence
from rollmesh.config.trainer import TrainerConfig
from rollmesh.trainer.learner.policy_files import PolicyCopy, WriteWeights
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.trainer.service.publishing import canary_count, canary_sequences, scored_canary

SMALL: dict[str, Any] = {"hidden_size": 96, "num_hidden_layers": 3, "intermediate_size": 192, "vocab_size": 96}
"""Shape of the demo's model (250,000 parameters, 1 MB)."""
_VOCABULARY, _MLP_WIDTHS = 8192, 3
_WIDE_BYTES = 256 << 20
"""Size from which a model has hidden states of 1024 numbers instead of 512."""


def write_random_model(folder: Path, shape: Mapping[str, Any]) -> None:
    """Write a Qwen2 model with random float32 weights; ``shape`` has fields of its configuration."""
    from transformers import AutoModelForCausalLM, Qwen2Config
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(0)
    heads = {"num_attention_heads": shape["hidden_size"] // 32, "num_key_value_heads": 1}
    auto: Any = AutoModelForCausalLM
    config = Qwen2Config(**{"max_position_embeddings": 256, "tie_word_embeddings": True, **heads, **shape})
    auto.from_config(config).save_pretrained(folder)


def shape_of_size(size_bytes: int) -> dict[str, Any]:
    """Return the shape of a model of about this size in float32."""
    hidden = 1024 if size_bytes >= _WIDE_BYTES else 512
    per_layer = (2 + 3 * _MLP_WIDTHS) * hidden**2 + 64 * hidden
    return {
        "hidden_size": hidden,
        "num_hidden_layers": max(1, round((size_bytes / 4 - _VOCABULARY * hidden) / per_layer)),
        "intermediate_size": _MLP_WIDTHS * hidden,
        "vocab_size": _VOCABULARY,
    }


def token_logprobs(model: Any, ids: Tensor) -> Tensor:
    """Return the log-probability of every token after the first, [rows, tokens - 1], by a plain forward pass."""
    with torch.inference_mode():
        logprobs: Tensor = model(ids).logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)
    return logprobs


class PublishedModel:
    """Model whose weights all change in every version, and are copied out, written and scored as a trainer does."""

    def __init__(self, folder: Path) -> None:
        """Load a Hugging Face folder; its policies are float32 if it is, else bfloat16."""
        config = json.loads((folder / "config.json").read_text())
        stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        self.dtype = "float32" if stored == "float32" else "bfloat16"
        """Value of ``model.dtype`` of the run."""
        self.vocab_size = int(config["vocab_size"])
        self._trainer = PolicyTrainer(folder, TrainerConfig(), dtype=self.dtype, device="cpu")
        self._canary = canary_sequences(self.vocab_size, canary_count(self._trainer.parameter_count, "cpu"))
        self._copies: list[tuple[float, float]] = []
        self._canaries: list[float] = []

    @property
    def copy_seconds(self) -> tuple[float, float]:
        """Median seconds of a copy out, and of a plain copy of the same tensors by numpy, without the first policy."""
        ours, plain = zip(*self._copies[1:], strict=True)  # the first copy allocates its memory
        return statistics.median(ours), statistics.median(plain)

    @property
    def canary_seconds(self) -> float:
        """Median seconds in which the canary of a policy is scored, without the first one."""
        return statistics.median(self._canaries[1:])

    def policy(self, version: int) -> tuple[WriteWeights, partial[list[CanarySequence]]]:
        """Change all weights and copy them out; return the functions that write the copy and score its canary."""
        weights = {
            name.removeprefix("model."): tensor
            for name, tensor in self._trainer.state_tensors().items()
            if name.startswith("model.")
        }
        for tensor in weights.values():
            tensor.detach().mul_(1.001)
        started = time.monotonic()
        copied = self._trainer.copy_out()
        done = time.monotonic()
        if self.dtype == "float32":
            for name, tensor in weights.items():
                np.copyto(copied.weights[name].numpy(), tensor.detach().numpy())
        self._copies.append((done - started, time.monotonic() - done))
        return copied.write, partial(self._scored, version, copied)

    def _scored(self, version: int, copied: PolicyCopy) -> list[CanarySequence]:
        started = time.monotonic()
        logprobs = (copied.score or self._trainer.logprobs)(self._canary)
        self._canaries.append(time.monotonic() - started)
        return scored_canary(version, self._canary, logprobs)
