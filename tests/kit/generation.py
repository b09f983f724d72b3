"""Calls of generation engines, what they stream, and the same log-probabilities by transformers."""

import asyncio
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rollmesh.generator.engines.engine_protocol import Engine
from rollmesh.kept_sets import join_sets
from rollmesh.types import Chunk, FinishReason, Float32Array, GenerationCall, Int32Array, SamplingParams

from .waiting import reached

VOCAB = 61


@functools.lru_cache
def load_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def hf_logits(folder: Path, ids: Int32Array) -> torch.Tensor:
    """Logits of every token after the first, by plain teacher forcing, float32 [tokens - 1, vocab]."""
    with torch.inference_mode():
        found: torch.Tensor = load_model(folder)(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, :-1]
        return found


def hf_logprobs(folder: Path, ids: Int32Array, temperature: float = 1.0) -> Float32Array:
    """log_softmax(z / T) of every token after the first, float32 [tokens - 1]."""
    logprobs = torch.log_softmax(hf_logits(folder, ids) / (temperature or 1.0), dim=-1)
    return logprobs.gather(1, torch.from_numpy(ids[1:, None].astype(np.int64))).squeeze(1).numpy()


def hf_truncated(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """The distributions that transformers' generate draws from, float64 [rows, vocab]; 0 for what it drops."""
    warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(float(sampling.temperature))]
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    scores = logits.double()
    for warper in warpers:
        scores = warper(torch.empty(0), scores)
    return torch.softmax(scores, -1)


def logprob_over(kept: Sequence[int], token: int, logits: torch.Tensor, temperature: float) -> float:
    """log(exp(z/T) of the token / sum of exp(z/T) of the kept ones), by a loop in float64."""
    z = [float(logits[each]) / temperature for each in kept]
    return float(logits[token]) / temperature - max(z) - math.log(math.fsum(math.exp(each - max(z)) for each in z))


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Probability of a chi-square at least as large, from the incomplete gamma function."""
    expected = probabilities * counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    degrees = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, torch.tensor(statistic / 2)))


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
        return np.concatenate([np.empty(0, np.int32), *(c.token_ids for c in self.chunks)])

    @property
    def ids(self) -> Int32Array:
        """Context and tokens."""
        return np.concatenate((self.call.context_ids, self.tokens))

    @property
    def logprobs(self) -> Float32Array:
        return np.concatenate([np.empty(0, np.float32), *(c.behavior_logprobs for c in self.chunks)])

    @property
    def kept(self) -> list[list[int]]:
        """The kept set of every token."""
        sets = join_sets((len(c.token_ids), c.kept_sets) for c in self.chunks)
        if sets is None:
            return [[] for _ in self.tokens]
        return [part.tolist() for part in np.split(sets.ids, np.cumsum(sets.counts))[:-1]]

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
        at, temperature = len(self.call.context_ids) - 1, self.call.sampling.temperature
        kept = dict(enumerate(self.kept, at))
        for chunk in self.chunks:
            logits = hf_logits(folders[chunk.policy_version], self.ids)
            wanted = hf_logprobs(folders[chunk.policy_version], self.ids, temperature)
            span = range(at, at := at + len(chunk.token_ids))
            if chunk.kept_sets is not None:
                wanted[span] = [logprob_over(kept[i], int(self.ids[i + 1]), logits[i], temperature) for i in span]
            np.testing.assert_allclose(chunk.behavior_logprobs, wanted[span], atol=1e-4)


async def collect(engine: Engine, call: GenerationCall) -> Rollout:
    return Rollout(call, [chunk async for chunk in engine.generate(call)])


class Running:
    """Calls under way, each of which has delivered tokens."""

    def __init__(self, engine: Engine, calls: list[GenerationCall]) -> None:
        self.rollouts = [Rollout(call, []) for call in calls]
        self.tasks = [asyncio.create_task(self._read(engine, rollout)) for rollout in self.rollouts]

    async def _read(self, engine: Engine, rollout: Rollout) -> None:
        async for chunk in engine.generate(rollout.call):
            rollout.chunks.append(chunk)

    async def begun(self, chunks: int = 1) -> "Running":
        await reached(lambda: all(len(r.chunks) >= chunks or t.done() for r, t in self.pairs()))
        for task in self.tasks:
            if task.done():
                task.result()
        return self

    def pairs(self) -> list[tuple[Rollout, asyncio.Task[None]]]:
        return list(zip(self.rollouts, self.tasks, strict=True))

    async def end(self) -> list[Rollout]:
        async with asyncio.timeout(180):
            await asyncio.gather(*self.tasks)
        return self.rollouts

    async def end_saved(self, engine: Engine) -> list[Rollout]:
        """End calls that have a limit of unacknowledged tokens: acknowledge their tokens as they arrive."""
        while not all(task.done() for task in self.tasks):
            engine.acknowledge({r.call.trajectory_id: len(r.ids) for r in self.rollouts if r.chunks})
            await asyncio.sleep(0.001)
        return await self.end()


async def start_calls(engine: Engine, count: int, **changes: Any) -> Running:
    """Long calls that have delivered their first chunk."""
    fields = {"max_new_token_count": 200, **changes}
    return await Running(engine, [make_call(f"t{i}", prompt_ids(i, 8), **fields) for i in range(count)]).begun()
