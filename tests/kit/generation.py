"""Calls of generation engines, what they stream, and the same log-probabilities by transformers."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rollmesh.generator.engines.engine_protocol import Engine
from rollmesh.types import Chunk, FinishReason, Float32Array, GenerationCall, Int32Array, SamplingParams

VOCAB = 61


@functools.lru_cache
def load_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def hf_logprobs(folder: Path, ids: Int32Array, temperature: float = 1.0) -> Float32Array:
    """log_softmax(z / T) of every token after the first, by plain teacher forcing, float32 [tokens - 1]."""
    with torch.inference_mode():
        tokens = torch.from_numpy(ids.astype(np.int64))
        logprobs = torch.log_softmax(load_model(folder)(tokens[None]).logits[0] / (temperature or 1.0), dim=-1)
        return logprobs[:-1].gather(1, tokens[1:, None]).squeeze(1).numpy()


def prompt_ids(seed: int, count: int = 12) -> Int32Array:
    return np.random.default_rng(seed).integers(0, VOCAB, count).astype(np.int32)


def make_call(name: str = "t", context: Int32Array | None = None, **changes: Any) -> GenerationCall:
    """A call; keyword arguments are fields of GenerationCall or of SamplingParams."""
    ids = prompt_ids(0) if context is None else context
    sampling = {k: changes.pop(k) for k in list(changes) if k in SamplingParams.__dataclass_fields__}
    fields: dict[str, Any] = {
        "prompt_token_count": len(ids),
        "max_new_token_count": 40,
        "chunk_token_count": 8,
        "sampling": SamplingParams(**{"seed": 7, **sampling}),
        **changes,
    }
    return GenerationCall(trajectory_id=name, context_ids=ids, **fields)


@dataclass(frozen=True)
class Rollout:
    """Chunks that one call streamed."""

    call: GenerationCall
    chunks: list[Chunk]

    @property
    def tokens(self) -> Int32Array:
        return np.concatenate([c.token_ids for c in self.chunks])

    @property
    def ids(self) -> Int32Array:
        """Context and tokens."""
        return np.concatenate((self.call.context_ids, self.tokens))

    @property
    def logprobs(self) -> Float32Array:
        return np.concatenate([c.behavior_logprobs for c in self.chunks])

    @property
    def reason(self) -> FinishReason | None:
        return self.chunks[-1].finish_reason

    @property
    def versions(self) -> list[int]:
        return [c.policy_version for c in self.chunks if len(c.token_ids)]

    @property
    def stamps(self) -> set[tuple[int, int]]:
        return {(c.policy_version, c.kv_min_version) for c in self.chunks if len(c.token_ids)}

    def check_pure(self, folders: list[Path]) -> None:
        """Every token's log-probability is that of the version that it is stamped with, recomputed from scratch."""
        assert all(pure == version for version, pure in self.stamps)
        at = len(self.call.context_ids) - 1
        for chunk in self.chunks:
            wanted = hf_logprobs(folders[chunk.policy_version], self.ids, self.call.sampling.temperature)
            np.testing.assert_allclose(chunk.behavior_logprobs, wanted[at : at + len(chunk.token_ids)], atol=1e-4)
            at += len(chunk.token_ids)


async def collect(engine: Engine, call: GenerationCall) -> Rollout:
    return Rollout(call, [chunk async for chunk in engine.generate(call)])
