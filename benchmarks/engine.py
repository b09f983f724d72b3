"""Tokens per CPU second of the torch engine, beside Hugging Face ``generate``.

One thread, a random model of the demo's shape, prompts of 32 tokens. Both sides sample at temperature 1 and return the
log-probability of every token. Mixed lengths: 256 prompts with lognormal lengths. The engine has 64 slots, which are
refilled at once; the baseline runs batches of 64, which wait for their longest member. Only requested tokens count.

``--speculation`` measures speculation from history instead, beside plain decoding of the same calls.

``--save FILE`` also measures decode steps at two contexts and writes the curve that ``rollmesh sim`` reads.
"""

import asyncio
import math
import statistics
import tempfile
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks import speculation as speculation_bench
from benchmarks.decode_steps import NEW_TOKENS as CURVE_TOKENS
from benchmarks.decode_steps import measure_points, measure_prefill, step_measure
from benchmarks.frame import Measure, Quick, at_least, at_most, compared, interleaved
from benchmarks.models import SMALL, token_logprobs, write_random_model
from benchmarks.workloads import make_call, random_ids
from rollmesh.config.generator import GeneratorConfig
from rollmesh.generator.engines.torch.torch_engine import TorchEngine
from rollmesh.sim.decode_curve import DecodeCurve, write_curve
from rollmesh.types import Float32Array, Int32Array

PROMPT_TOKENS, NEW_TOKENS = 32, 64
MIXED_SLOTS = 64
_CONTEXT = 1024
_MEDIAN_LENGTH, _SIGMA, _LONGEST = 60, 1.0, 900
_SIZES = (1, 8, 32, 128)
_BARS = {8: (at_least("ratio", 2.5),), 32: (at_least("ratio", 3.0),)}
_CURVE_CONTEXTS = (128, _CONTEXT - 2 * CURVE_TOKENS)


def run(
    *,
    quick: Quick = False,
    save: Annotated[Path | None, typer.Option(help="JSON file for a curve of decode steps, for rollmesh sim.")] = None,
    speculation: Annotated[bool, typer.Option("--speculation", help="Measure speculation from history.")] = False,
) -> list[Measure]:
    """Measure; ``quick`` runs one repetition instead of five, up to 32 calls, with a quarter of the mixed prompts.

    Raises ConfigError if the machine was too busy for a usable curve; that of ``quick`` is not checked.
    """
    repeats = 1 if quick else 5
    if speculation:
        with asyncio.Runner() as runner:
            return speculation_bench.measure(runner, quick=quick)
    with tempfile.TemporaryDirectory(prefix="rollmesh-bench-") as name, asyncio.Runner() as runner:
        folder = Path(name)
        write_random_model(folder, {**SMALL, "max_position_embeddings": 2 * _CONTEXT})
        reference = HuggingFace(folder)
        ours, mixed = _Ours(runner, folder, max(_SIZES)), _Ours(runner, folder, MIXED_SLOTS)
        try:
            measures = [_logprob_gap(ours, reference)]
            measures += [_uniform(ours, reference, size, repeats) for size in (_SIZES[:-1] if quick else _SIZES)]
            measures.append(_mixed(mixed, reference, mixed_lengths(64 if quick else 256), repeats))
            if save is not None:
                measures += runner.run(_save_curve(ours.engine, save, quick=quick))
        finally:
            for engine in (ours.engine, mixed.engine):
                runner.run(engine.aclose())
    if save is not None and not quick:
        DecodeCurve.read(save)
    return measures


def _logprob_gap(ours: "_Ours", reference: "HuggingFace") -> Measure:
    """Compare logprobs of 200 tokens a prompt with those of teacher forcing."""
    prompts, gap = make_prompts(32), 0.0
    for prompt, (tokens, logprobs) in zip(prompts, ours.generate(prompts, [200] * 32), strict=True):
        wanted = reference.score(np.concatenate((prompt, tokens)))[PROMPT_TOKENS - 1 :]
        gap = float(np.maximum(gap, np.abs(logprobs - wanted).max()))  # unlike max(), np.maximum keeps a NaN
    bars = (at_most("value", 1e-4),)
    return Measure(name="largest logprob gap to HF teacher forcing", value=gap, unit="nats", bars=bars)


def _uniform(ours: "_Ours", reference: "HuggingFace", size: int, repeats: int) -> Measure:
    prompts, tokens = make_prompts(size), size * NEW_TOKENS
    seeds = count(2)  # new prompts each time: the engine finds what ended calls have left
    work = {
        "ours": lambda: ours.generate(make_prompts(size, next(seeds)), [NEW_TOKENS] * size),
        "theirs": lambda: reference.generate(prompts, NEW_TOKENS),
    }
    rate = {name: tokens / seconds for name, seconds in interleaved(work, repeats).items()}
    name, bars = f"{size} calls of {NEW_TOKENS} tokens", _BARS.get(size, ())
    return compared(name, rate["ours"], "tokens/cpu-s", "HF generate, static cache", rate["theirs"], bars)


def _mixed(ours: "_Ours", reference: "HuggingFace", lengths: Sequence[int], repeats: int) -> Measure:
    prompts = make_prompts(len(lengths))

    def batches() -> None:
        for start in range(0, len(lengths), MIXED_SLOTS):
            chosen = slice(start, start + MIXED_SLOTS)
            reference.generate(prompts[chosen], max(lengths[chosen]))

    # The engine's cache grows to the size of the longest calls; generate allocates a new cache for every batch.
    ours.generate(prompts, lengths)
    reference.generate(prompts[:MIXED_SLOTS], NEW_TOKENS)
    seeds = count(2)
    work = {"ours": lambda: ours.generate(make_prompts(len(lengths), next(seeds)), lengths), "theirs": batches}
    rate = {name: sum(lengths) / seconds for name, seconds in interleaved(work, repeats, warm_up=0).items()}
    p50, p99 = np.percentile(lengths, [50, 99])
    name = f"{len(lengths)} calls of mixed lengths (p50 {p50:.0f}, p99 {p99:.0f}), useful tokens"
    baseline = f"HF generate in batches of {MIXED_SLOTS}"
    return compared(name, rate["ours"], "tokens/cpu-s", baseline, rate["theirs"], (at_least("ratio", 5.0),))


async def _save_curve(engine: TorchEngine, save: Path, *, quick: bool) -> list[Measure]:
    """Measure and write the decode curve of the engine; return a measure per point."""
    ids = random_ids(np.random.default_rng(2), SMALL["vocab_size"], _CONTEXT)
    counts, rounds = (_SIZES[:2], 1) if quick else (_SIZES, 3)
    points = await measure_points(engine, ids, counts, _CURVE_CONTEXTS, rounds=rounds)
    prefill = await measure_prefill(engine, ids, _CURVE_CONTEXTS[-1])
    write_curve(save, points, prefill, "torch engine, demo's shape, one CPU thread")
    return [step_measure(point) for point in points]


def make_prompts(count: int, seed: int = 1) -> Int32Array:
    """Return different random prompts, int32 [count, PROMPT_TOKENS]."""
    return random_ids(np.random.default_rng(seed), SMALL["vocab_size"], count, PROMPT_TOKENS)


def mixed_lengths(count: int) -> list[int]:
    """Return lognormal response lengths with a long tail, in random order: p99 is at least 8 times p50.

    They are quantiles of the distribution, not samples: a small sample may lack the tail.
    """
    normal = statistics.NormalDist(math.log(_MEDIAN_LENGTH), _SIGMA)
    lengths = np.exp([normal.inv_cdf((at + 0.5) / count) for at in range(count)])
    shuffled = np.random.default_rng(0).permutation(np.clip(lengths, 4, _LONGEST).astype(np.int64))
    return [int(length) for length in shuffled]


class _Ours:
    """Torch engine whose calls run to their ends; the event loop does not run between loads."""

    def __init__(self, runner: asyncio.Runner, folder: Path, slots: int) -> None:
        self._runner = runner
        config = GeneratorConfig(slots=slots, max_context_tokens=_CONTEXT, device="cpu")
        self.engine = TorchEngine(config, several_turns=False)
        runner.run(self.engine.start(folder, 0))

    def generate(self, prompts: Int32Array, lengths: Sequence[int]) -> list[tuple[Int32Array, Float32Array]]:
        """Continue prompts by these numbers of tokens, all at once; return the tokens and their logprobs."""

        async def one(row: int) -> tuple[Int32Array, Float32Array]:
            call = make_call(f"t{row}", prompts[row], lengths[row], chunk_tokens=NEW_TOKENS)
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

    def generate(self, prompts: Int32Array, new_tokens: int) -> None:
        """Continue prompts [rows, tokens] by ``new_tokens``, and gather their logprobs."""
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
            logprobs.gather(2, found.sequences[:, ids.shape[1] :, None]).numpy()

    def score(self, ids: Int32Array) -> Float32Array:
        """Return teacher-forced logprobs of every token after the first, [tokens - 1]."""
        result: Float32Array = token_logprobs(self._model, torch.from_numpy(ids.astype(np.int64))[None])[0].numpy()
        return result
