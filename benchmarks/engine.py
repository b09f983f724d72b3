"""Tokens per CPU second of the torch engine and of Hugging Face ``generate``.

One thread, a random model of the demo's shape, prompts of 32 tokens. Both sides sample at temperature 1 and return the
log-probability of every token. Repetitions are interleaved and the median counts, so that a busy machine slows both.
Mixed lengths: 256 prompts with lognormal lengths. The engine has 64 slots, which are refilled at once; the baseline
runs batches of 64, which wait for their longest member. Only requested tokens count.

``--save FILE`` also measures decode steps at two contexts and writes the curve that ``rollmesh sim`` reads.

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
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.decode_steps import NEW_TOKENS as CURVE_TOKENS
from benchmarks.decode_steps import measure_points, measure_prefill, step_measure
from benchmarks.frame import Quick
from benchmarks.measure import Measure, at_least, at_most, compared, interleaved
from benchmarks.models import SMALL, RandomModel, token_logprobs
from benchmarks.processes import ONE_THREAD
from benchmarks.workloads import make_call, random_ids
from rollmesh.config.generator import GeneratorConfig
from rollmesh.errors import EngineError
from rollmesh.generator.engines.torch.torch_engine import TorchEngine
from rollmesh.sim.decode_curve import DecodeCurve, write_curve
from rollmesh.types import Float32Array, Int32Array

PROMPT_TOKENS = 32
NEW_TOKENS = 64
MIXED_SLOTS = 64
_CONTEXT = 1024
_MEDIAN_LENGTH, _SIGMA, _LONGEST = 60, 1.0, 900
_UNIFORM_SIZES = (1, 8, 32, 128)
_UNIFORM_BARS = {8: (at_least("ratio", 2.5),), 32: (at_least("ratio", 3.0),)}
_MIXED_BARS = (at_least("ratio", 5.0),)
_GAP_BARS = (at_most("value", 1e-4),)

_CURVE_CONTEXTS = (128, _CONTEXT - 2 * CURVE_TOKENS)
_CURVE_COUNTS = (1, 8, 32, max(_UNIFORM_SIZES))
_QUICK_COUNTS = (1, 8)
_CURVE_ROUNDS = 3

Int64Array = np.ndarray[Any, np.dtype[np.int64]]


def run(
    *,
    quick: Quick = False,
    save: Annotated[Path | None, typer.Option(help="JSON file for a curve of decode steps, for rollmesh sim.")] = None,
) -> list[Measure]:
    """Measure; ``quick`` runs one repetition instead of five, up to 32 calls, with a quarter of the mixed prompts.

    ``save`` names the file of a decode curve. Raises ConfigError if the machine was too busy for a usable one; a curve
    of ``quick`` has few points from one round and is not checked.
    """
    options = ["--quick"] * quick + (["--save", str(save)] if save is not None else [])
    command = [sys.executable, "-P", "-m", __name__, *options]
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"}
    done = subprocess.run(command, env={**environment, **ONE_THREAD}, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise EngineError(f"the measuring process ended with status {done.returncode}")
    if save is not None and not quick:
        DecodeCurve.read(save)
    return [Measure.from_line(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main(arguments: Sequence[str]) -> None:
    """Run the measuring process: print one JSON object per measure on standard output."""
    torch.set_num_threads(1)
    quick = "--quick" in arguments
    save = Path(arguments[arguments.index("--save") + 1]) if "--save" in arguments else None
    with tempfile.TemporaryDirectory(prefix="rollmesh-bench-") as folder:
        RandomModel(shape={**SMALL, "max_position_embeddings": 2 * _CONTEXT}).write(Path(folder))
        for measure in _measure(Path(folder), quick=quick, save=save):
            print(measure.to_line())


def mixed_lengths(count: int) -> Int64Array:
    """Return lognormal response lengths with a long tail, in random order: p99 is at least 8 times p50.

    They are quantiles of the distribution, not samples: a small sample may lack the tail.
    """
    normal = statistics.NormalDist(math.log(_MEDIAN_LENGTH), _SIGMA)
    lengths = np.exp([normal.inv_cdf((at + 0.5) / count) for at in range(count)])
    return np.random.default_rng(0).permutation(np.clip(lengths, 4, _LONGEST).astype(np.int64))


def _measure(folder: Path, *, quick: bool, save: Path | None) -> list[Measure]:
    reference, repeats = HuggingFace(folder), 1 if quick else 5
    with asyncio.Runner() as runner:
        ours = _Ours(runner, folder, max(_UNIFORM_SIZES))
        mixed = _Ours(runner, folder, MIXED_SLOTS)
        try:
            results = [_logprob_gap(ours, reference)]
            sizes = _UNIFORM_SIZES[:-1] if quick else _UNIFORM_SIZES
            results += [_uniform(ours, reference, size, repeats) for size in sizes]
            results.append(_mixed(mixed, reference, mixed_lengths(64 if quick else 256), repeats))
            return results if save is None else results + runner.run(_save_curve(ours.engine, save, quick=quick))
        finally:
            runner.run(ours.engine.aclose())
            runner.run(mixed.engine.aclose())


async def _save_curve(engine: TorchEngine, save: Path, *, quick: bool) -> list[Measure]:
    """Measure and write the decode curve of the engine; return a measure per point."""
    ids = random_ids(np.random.default_rng(2), SMALL["vocab_size"], _CONTEXT)
    counts, rounds = (_QUICK_COUNTS, 1) if quick else (_CURVE_COUNTS, _CURVE_ROUNDS)
    points = await measure_points(engine, ids, counts, _CURVE_CONTEXTS, rounds=rounds)
    prefill = await measure_prefill(engine, ids, _CURVE_CONTEXTS[-1])
    write_curve(save, points, prefill, "torch engine, demo's shape, one CPU thread")
    return [step_measure(point) for point in points]


class _Ours:
    """Torch engine whose calls run to their ends; the event loop does not run between loads."""

    def __init__(self, runner: asyncio.Runner, folder: Path, slots: int) -> None:
        self._runner = runner
        self.engine = TorchEngine(GeneratorConfig(slots=slots, max_context_tokens=_CONTEXT, device="cpu"))
        runner.run(self.engine.start(folder, 0))

    def generate(self, prompts: Int32Array, lengths: Sequence[int]) -> list[tuple[Int32Array, Float32Array]]:
        """Continue prompts by these numbers of tokens, all at once; return the tokens and their logprobs."""

        async def one(row: int) -> tuple[Int32Array, Float32Array]:
            call = make_call(f"t{row}", prompts[row], int(lengths[row]), chunk_tokens=NEW_TOKENS)
            chunks = [chunk async for chunk in self.engine.generate(call)]
            tokens, logprobs = ([c.token_ids for c in chunks], [c.behavior_logprobs for c in chunks])
            return np.concatenate(tokens), np.concatenate(logprobs)

        async def every() -> list[tuple[Int32Array, Float32Array]]:
            return await asyncio.gather(*(one(row) for row in range(len(prompts))))

        return self._runner.run(every())


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
        result: Float32Array = token_logprobs(self._model, torch.from_numpy(ids.astype(np.int64))[None])[0].numpy()
        return result


def make_prompts(count: int) -> Int32Array:
    """Return different random prompts, int32 [count, PROMPT_TOKENS]."""
    return random_ids(np.random.default_rng(1), SMALL["vocab_size"], count, PROMPT_TOKENS)


def _logprob_gap(ours: _Ours, reference: HuggingFace) -> Measure:
    prompts = make_prompts(32)
    gap = 0.0
    for prompt, (tokens, logprobs) in zip(prompts, ours.generate(prompts, [200] * 32), strict=True):
        wanted = reference.score(np.concatenate((prompt, tokens)))[PROMPT_TOKENS - 1 :]
        gap = float(np.maximum(gap, np.abs(logprobs - wanted).max()))  # unlike max(), np.maximum keeps a NaN
    return Measure(name="largest logprob gap to HF teacher forcing", value=gap, unit="nats", bars=_GAP_BARS)


def _uniform(ours: _Ours, reference: HuggingFace, size: int, repeats: int) -> Measure:
    prompts, tokens = make_prompts(size), size * NEW_TOKENS
    work = {
        "ours": lambda: ours.generate(prompts, [NEW_TOKENS] * size),
        "theirs": lambda: reference.generate(prompts, NEW_TOKENS),
    }
    rate = {name: tokens / seconds for name, seconds in interleaved(work, repeats).items()}
    name, bars = f"{size} calls of {NEW_TOKENS} tokens", _UNIFORM_BARS.get(size, ())
    return compared(name, rate["ours"], "tokens/cpu-s", "HF generate, static cache", rate["theirs"], bars)


def _mixed(ours: _Ours, reference: HuggingFace, lengths: Int64Array, repeats: int) -> Measure:
    prompts = make_prompts(len(lengths))

    def batches() -> None:
        for start in range(0, len(lengths), MIXED_SLOTS):
            chosen = slice(start, start + MIXED_SLOTS)
            reference.generate(prompts[chosen], int(lengths[chosen].max()))

    # The engine's cache grows to the size of the longest calls; generate allocates a new cache for every batch.
    ours.generate(prompts, lengths.tolist())
    reference.generate(prompts[:MIXED_SLOTS], NEW_TOKENS)
    work = {"ours": lambda: ours.generate(prompts, lengths.tolist()), "theirs": batches}
    rate = {name: int(lengths.sum()) / seconds for name, seconds in interleaved(work, repeats, warm_up=0).items()}
    p50, p99 = np.percentile(lengths, [50, 99])
    name = f"{len(lengths)} calls of mixed lengths (p50 {p50:.0f}, p99 {p99:.0f}), useful tokens"
    baseline = f"HF generate in batches of {MIXED_SLOTS}"
    return compared(name, rate["ours"], "tokens/cpu-s", baseline, rate["theirs"], _MIXED_BARS)


if __name__ == "__main__":
    main(sys.argv[1:])
