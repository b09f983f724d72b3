"""``rollmesh bench engine``: tokens per CPU second of the torch engine and of Hugging Face ``generate``.

One thread, a random model of the demo's shape, prompts of 32 tokens. Both sides sample at temperature 1 and return the
log-probability of every token. Repetitions are interleaved and the median counts, so that a busy machine slows both.
Mixed lengths: 256 prompts with lognormal lengths. The engine has 64 slots, which are refilled at once; the baseline
runs batches of 64, which wait for their longest member. Only requested tokens count.

It runs in a separate process, with one thread for every library, as the launcher starts generators. The variable
OPENBLAS_CORETYPE is removed there, so that numpy's BLAS chooses its kernels for this processor.
"""

from __future__ import annotations

import asyncio
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollmesh.bench.measure import Bar, Figure, Measure, at_least, at_most, compared
from rollmesh.errors import EngineError
from rollmesh.generator.engines.torch.torch_engine import TorchEngine
from rollmesh.generator.engines.torch.torch_options import TorchEngineOptions
from rollmesh.types import Float32Array, GenerationCall, Int32Array, SamplingParams

VOCABULARY = 96
PROMPT_TOKENS = 32
NEW_TOKENS = 64
MIXED_SLOTS = 64
_CONTEXT = 1024
_MEDIAN_LENGTH, _SIGMA, _LONGEST = 60, 1.0, 900
_UNIFORM_SIZES = (1, 8, 32, 128)
_UNIFORM_BARS = {8: (at_least(Figure.RATIO, 2.5),), 32: (at_least(Figure.RATIO, 3.0),)}
_MIXED_BARS = (at_least(Figure.RATIO, 5.0),)
_GAP_BARS = (at_most(Figure.VALUE, 1e-4),)

Int64Array = np.ndarray[Any, np.dtype[np.int64]]


def run(*, quick: bool = False) -> list[Measure]:
    """Measure; ``quick`` runs one repetition instead of five, with a quarter of the mixed prompts."""
    command = [sys.executable, "-m", __name__, *(["--quick"] if quick else [])]
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"}
    environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise EngineError(f"the measuring process ended with status {done.returncode}")
    return [Measure.from_line(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main(arguments: Sequence[str]) -> None:
    """Run the measuring process: print one JSON object per measure on standard output."""
    torch.set_num_threads(1)
    quick = "--quick" in arguments
    with tempfile.TemporaryDirectory(prefix="rollmesh-bench-") as folder:
        write_demo_shape(Path(folder))
        for measure in asyncio.run(_measure(Path(folder), 1 if quick else 5, prompts=64 if quick else 256)):
            print(measure.to_line())


def write_demo_shape(folder: Path) -> None:
    """Write a random model of the demo's shape (250,000 parameters)."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        intermediate_size=192,
        tie_word_embeddings=True,
        max_position_embeddings=2 * _CONTEXT,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def mixed_lengths(count: int) -> Int64Array:
    """Return lognormal response lengths with a long tail, in random order: p99 is at least 8 times p50.

    They are quantiles of the distribution, not samples: a small sample may lack the tail.
    """
    normal = statistics.NormalDist(math.log(_MEDIAN_LENGTH), _SIGMA)
    lengths = np.exp([normal.inv_cdf((at + 0.5) / count) for at in range(count)])
    return np.random.default_rng(0).permutation(np.clip(lengths, 4, _LONGEST).astype(np.int64))


async def _measure(folder: Path, repeats: int, prompts: int) -> list[Measure]:
    engine = TorchEngine(TorchEngineOptions(slots=max(_UNIFORM_SIZES), max_context_tokens=_CONTEXT, device="cpu"))
    mixed = TorchEngine(TorchEngineOptions(slots=MIXED_SLOTS, max_context_tokens=_CONTEXT, device="cpu"))
    await engine.start(folder, 0)
    await mixed.start(folder, 0)
    reference = HuggingFace(folder)
    try:
        results = [await _logprob_gap(engine, reference)]
        for size in _UNIFORM_SIZES:
            results.append(await _uniform(engine, reference, size, repeats))
        results.append(await _mixed(mixed, reference, mixed_lengths(prompts), repeats))
        return results
    finally:
        await engine.aclose()
        await mixed.aclose()


class HuggingFace:
    """Baseline: ``generate`` with a static cache, sampling, and log-probabilities of the sampled tokens."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model = model.eval()
        self._model.generation_config.eos_token_id = None

    def generate(self, prompts: Int32Array, new_tokens: int) -> Float32Array:
        """Continue prompts [rows, tokens] by ``new_tokens``; return their logprobs, [rows, new_tokens]."""
        ids = torch.from_numpy(prompts.astype(np.int64))
        with torch.inference_mode():
            found = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                max_new_tokens=new_tokens,
                cache_implementation="static",
                disable_compile=True,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
            logprobs = torch.stack(found.logits, dim=1).log_softmax(-1)
            taken = logprobs.gather(2, found.sequences[:, ids.shape[1] :, None])
        result: Float32Array = taken.squeeze(2).numpy()
        return result

    def score(self, ids: Int32Array) -> Float32Array:
        """Return teacher-forced logprobs of every token after the first, [tokens - 1]."""
        tokens = torch.from_numpy(ids.astype(np.int64))
        with torch.inference_mode():
            logprobs = self._model(tokens[None]).logits[0].log_softmax(-1)
            result: Float32Array = logprobs[:-1].gather(1, tokens[1:, None]).squeeze(1).numpy()
        return result


def make_prompts(count: int) -> Int32Array:
    """Return different random prompts, int32 [count, PROMPT_TOKENS]."""
    return np.random.default_rng(1).integers(0, VOCABULARY, (count, PROMPT_TOKENS)).astype(np.int32)


async def _generate(
    engine: TorchEngine, prompts: Int32Array, lengths: Sequence[int]
) -> list[tuple[Int32Array, Float32Array]]:
    async def one(row: int) -> tuple[Int32Array, Float32Array]:
        call = GenerationCall(
            trajectory_id=f"t{row}",
            context_ids=prompts[row],
            prompt_token_count=PROMPT_TOKENS,
            max_new_token_count=int(lengths[row]),
            sampling=SamplingParams(),
            chunk_token_count=NEW_TOKENS,
        )
        chunks = [chunk async for chunk in engine.generate(call)]
        return (
            np.concatenate([c.token_ids for c in chunks]),
            np.concatenate([c.behavior_logprobs for c in chunks]),
        )

    return list(await asyncio.gather(*(one(row) for row in range(len(prompts)))))


async def _logprob_gap(engine: TorchEngine, reference: HuggingFace) -> Measure:
    prompts = make_prompts(32)
    gap = 0.0
    for prompt, (tokens, logprobs) in zip(prompts, await _generate(engine, prompts, [200] * 32), strict=True):
        wanted = reference.score(np.concatenate((prompt, tokens)))[PROMPT_TOKENS - 1 :]
        gap = float(np.maximum(gap, np.abs(logprobs - wanted).max()))  # unlike max(), np.maximum keeps a NaN
    return Measure(name="largest logprob gap to HF teacher forcing", value=gap, unit="nats", bars=_GAP_BARS)


async def _uniform(engine: TorchEngine, reference: HuggingFace, size: int, repeats: int) -> Measure:
    prompts = make_prompts(size)
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(repeats + 1):  # the first round warms up
        started = time.process_time()
        await _generate(engine, prompts, [NEW_TOKENS] * size)
        ours.append(time.process_time() - started)
        theirs.append(_cpu_seconds(lambda: reference.generate(prompts, NEW_TOKENS)))
    name = f"{size} calls of {NEW_TOKENS} tokens"
    bars = _UNIFORM_BARS.get(size, ())
    return _compared(name, size * NEW_TOKENS, ours[1:], theirs[1:], "HF generate, static cache", bars)


async def _mixed(engine: TorchEngine, reference: HuggingFace, lengths: Int64Array, repeats: int) -> Measure:
    prompts = make_prompts(len(lengths))

    def batches() -> None:
        for start in range(0, len(lengths), MIXED_SLOTS):
            chosen = slice(start, start + MIXED_SLOTS)
            reference.generate(prompts[chosen], int(lengths[chosen].max()))

    # The engine's cache grows to the size of the longest calls; generate allocates a new cache for every batch.
    await _generate(engine, prompts, lengths.tolist())
    reference.generate(prompts[:MIXED_SLOTS], NEW_TOKENS)
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(repeats):
        started = time.process_time()
        await _generate(engine, prompts, lengths.tolist())
        ours.append(time.process_time() - started)
        theirs.append(_cpu_seconds(batches))
    p50, p99 = np.percentile(lengths, [50, 99])
    name = f"{len(lengths)} calls of mixed lengths (p50 {p50:.0f}, p99 {p99:.0f}), useful tokens"
    baseline = f"HF generate in batches of {MIXED_SLOTS}"
    return _compared(name, int(lengths.sum()), ours, theirs, baseline, _MIXED_BARS)


def _cpu_seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def _compared(
    name: str, tokens: int, ours: list[float], theirs: list[float], baseline: str, bars: tuple[Bar, ...]
) -> Measure:
    rates = [tokens / statistics.median(seconds) for seconds in (ours, theirs)]
    return compared(name, rates[0], "tokens/cpu-s", baseline, rates[1], bars)


if __name__ == "__main__":
    main(sys.argv[1:])
