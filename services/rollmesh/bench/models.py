"""The models that a bench publishes as policies: random ones of a given shape, or one from a folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from rollmesh.checkpoints.manifest import CanarySequence
from rollmesh.errors import ConfigError

CONTEXT = 256
"""Positions of a random model that is not told otherwise."""
SMALL: dict[str, Any] = {"hidden_size": 96, "num_hidden_layers": 3, "intermediate_size": 192, "vocab_size": 96}
"""The demo's model: 1 MB."""
_CANARY_SHAPE = (8, 32)
"""Sequences and tokens of a canary, as the trainer's."""

Policy = tuple[Callable[[Path], Any], list[CanarySequence]]
"""How to write a policy's folder, and its canary."""


class BenchModel(Protocol):
    """Policies of one architecture."""

    @property
    def vocab_size(self) -> int:
        """Tokens that prompts may be made of."""

    @property
    def dtype(self) -> str:
        """``model.dtype`` of the run."""

    def policy(self, version: int) -> Policy:
        """The weights of one version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomModel:
    """Qwen2 with random float32 weights, other ones for every version."""

    shape: dict[str, Any]
    """Fields of its configuration."""
    dtype: str = "float32"

    @property
    def vocab_size(self) -> int:
        """Tokens that prompts may be made of."""
        return int(self.shape["vocab_size"])

    def policy(self, version: int) -> Policy:
        """The weights of one version."""
        from transformers import Qwen2Config, Qwen2ForCausalLM

        _be_quiet()
        torch.manual_seed(version)
        heads = {"num_attention_heads": self.shape["hidden_size"] // 32, "num_key_value_heads": 1}
        fields = {"max_position_embeddings": CONTEXT, "tie_word_embeddings": True, **heads, **self.shape}
        model: Any = Qwen2ForCausalLM(Qwen2Config(**fields))
        return model.save_pretrained, _canary(model, self.vocab_size)


class SavedModel:
    """A Hugging Face folder, the same weights for every version."""

    def __init__(self, folder: Path, longest: int) -> None:
        """ConfigError when it is no folder of a model with room for ``longest`` tokens."""
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
        """Tokens that prompts may be made of."""
        return self._vocab_size

    @property
    def dtype(self) -> str:
        """float32 where the folder says so, else bfloat16."""
        return self._dtype

    def policy(self, version: int) -> Policy:
        """The folder's weights; their canary is computed once, in float32."""
        if not self._canary:
            from transformers import AutoModelForCausalLM

            _be_quiet()
            model: Any = AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32)
            self._canary = _canary(model, self._vocab_size)
        return self._copy, self._canary

    def _copy(self, target: Path) -> None:
        for file in (*self._folder.glob("*.json"), *self._folder.glob("*.safetensors")):
            shutil.copyfile(file, target / file.name)


def _canary(model: Any, vocab_size: int) -> list[CanarySequence]:
    ids = torch.randint(0, vocab_size, _CANARY_SHAPE, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logprobs = model.eval()(ids).logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)
    return [
        CanarySequence(token_ids=row.tolist(), logprobs=scores.tolist())
        for row, scores in zip(ids, logprobs, strict=True)
    ]


def _be_quiet() -> None:
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
