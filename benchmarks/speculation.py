"""Speculation of the torch engine beside plain decoding of the same calls, with the demo's model and prompts.

One engine plays every load with drafts from a history and, in turn, without drafts: so both have the same weights,
memory and matrix products. Every repetition begins with the history of before, so that it does not grow meanwhile.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from statistics import median

import numpy as np

from benchmarks.frame import Measure, at_least, at_most, compared
from rollmesh.config.generator import GeneratorConfig
from rollmesh.config.recipes import recipe_file
from rollmesh.generator.engines.engine_protocol import SpeculationCounters
from rollmesh.generator.engines.torch.drafts import COMPARED, Drafts
from rollmesh.generator.engines.torch.speculation import HISTORY_TOKENS, MOST_CPU_TOKENS, Speculation
from rollmesh.generator.engines.torch.torch_engine import TorchEngine
from rollmesh.recipes.countdown.tokenizer import build_tokenizer, stop_token_ids
from rollmesh.tasks.countdown import draw_puzzle
from rollmesh.types import GenerationCall, Int32Array, SamplingParams

SIZES = (1, 4, 8, 32, 64)
_BARS = {1: 1.3, 4: 1.3}
_LEAST = 0.98
_CALLS = 4
"""Calls of a load by running calls; the mixed lengths of the demo's answers are refilled."""
_REPEATED_CALLS, _MOST_REPEATS = 1000, 40
"""Calls of all repetitions of a load with one history: as many more repetitions, the shorter the load."""
_GROUP, _EPOCH_GROUP = 8, 32
"""Siblings of a prompt; and its answers in the epoch before, which make the history."""
_USELESS_TEMPERATURE, _USELESS_LENGTH = 8.0, 8
"""Useless answers run to their budget, about 8 times as long as others: 8 times fewer make as long a history."""
_CONTEXT, _CHUNK = 640, 64

Answers = list[tuple[Int32Array, Int32Array]]
"""Prompts and responses."""


class _Engine:
    """Engine on the demo's model, whose calls run to their ends."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._engine = TorchEngine(
            GeneratorConfig(slots=64, max_context_tokens=_CONTEXT, device="cpu", speculation="history"),
            several_turns=False,
        )
        runner.run(self._engine.start(recipe_file("countdown", "model"), 0))

    def seconds(
        self, prompts: Sequence[Int32Array], name: str, size: int, speculation: Speculation | None
    ) -> tuple[float, int]:
        """Return the CPU seconds of all answers, with or without drafts, and their tokens."""
        assert self._engine._thread is not None
        self._engine._thread.batch.speculation = speculation  # between calls

        async def timed() -> tuple[
            float, int
        ]:  # without the end of the run, where signal.getsignal makes a text of the result
            started = time.process_time()
            answers = await self._answers(prompts, name, size)
            return time.process_time() - started, sum(len(response) for _, response in answers)

        return self._runner.run(timed())

    def play(self, prompts: Sequence[Int32Array], name: str, *, temperature: float = 1.0) -> Answers:
        """Answer prompts, all at once and without drafts."""
        assert self._engine._thread is not None
        self._engine._thread.batch.speculation = None
        return self._runner.run(self._answers(prompts, name, SIZES[-1], temperature))

    async def _answers(self, prompts: Sequence[Int32Array], name: str, size: int, temperature: float = 1.0) -> Answers:
        """Answer prompts, ``size`` at once; ``name`` and the place of a prompt are the call's noise."""
        places, stops = asyncio.Semaphore(size), tuple(stop_token_ids())

        async def one(number: int) -> tuple[Int32Array, Int32Array]:
            call = GenerationCall(
                trajectory_id=f"{name}.{number}",
                context_ids=prompts[number],
                prompt_token_count=len(prompts[number]),
                max_new_token_count=512,
                sampling=SamplingParams(temperature=temperature, stop_token_ids=stops),
                chunk_token_count=_CHUNK,
            )
            async with places:
                chunks = [chunk.token_ids async for chunk in self._engine.generate(call)]
            return prompts[number], np.concatenate(chunks)

        return list(await asyncio.gather(*map(one, range(len(prompts)))))

    def close(self) -> None:
        self._runner.run(self._engine.aclose())


def measure(runner: asyncio.Runner, *, quick: bool) -> list[Measure]:
    """Measure every load; ``quick`` has one repetition, and 1 and 4 running calls."""
    engine, measures = _Engine(runner), [_look_up()]
    try:
        for size in SIZES[:2] if quick else SIZES:
            measures += _load(engine, size, max(8, _CALLS * size), quick=quick)
        if not quick:
            measures += _load(engine, 64, 512, quick=False, name="512 calls of mixed lengths")
    finally:
        engine.close()
    return measures


def _look_up() -> Measure:
    """Measure the CPU time of a look-up in a history of 10 million tokens, the best of five rounds."""
    rng, drafts, asked = np.random.default_rng(2), Drafts(HISTORY_TOKENS), list[tuple[int, bytes]]()
    for key in range(HISTORY_TOKENS // (_GROUP * 1000)):
        ids = rng.integers(0, 30_000, 1000).astype(np.int32)
        for sibling in range(_GROUP):
            drafts.add(key, ids[:9], np.concatenate((ids[:500], ids[500:] + sibling)).astype(np.int32))
        until = int(rng.integers(COMPARED, 500))
        asked.append((key, ids[until - COMPARED : until].tobytes()))
    taken = []
    for _ in range(6):  # the first one indexes the responses
        started = time.process_time()
        for key, recent in asked:
            drafts.find(key, recent)
        taken.append((time.process_time() - started) / len(asked))
    return Measure(name="look-up", value=min(taken) * 1e6, unit="us", bars=(at_most("value", 5.0),))


def _load(engine: _Engine, size: int, calls: int, *, quick: bool, name: str = "") -> list[Measure]:
    """Compare plain decoding with three histories, ``size`` calls at once."""
    prompts, name = _prompts(calls, 1), name or f"{size} running"
    repeats = 1 if quick else min(_MOST_REPEATS, max(5, _REPEATED_CALLS // calls))
    histories: dict[str, Answers] = {"second epoch": [], "useless history": [], "siblings only": []}
    for member in range(4 if quick else _EPOCH_GROUP):
        histories["second epoch"] += engine.play(prompts, f"before{member}")
        if member % _USELESS_LENGTH == 0:
            useless = engine.play(prompts, f"before{member}", temperature=_USELESS_TEMPERATURE)
            histories["useless history"] += useless
    found: list[Measure] = []
    for kind, history in histories.items():
        speculation, pairs = (
            Speculation(build_tokenizer().get_vocab_size(), MOST_CPU_TOKENS, time.thread_time),
            list[tuple[float, float, int]](),
        )
        for number in range(1 + repeats):
            speculation.forget()
            for prompt, response in history:
                speculation.remember(prompt, response)
            speculation.drafts.find(0, bytes(4 * COMPARED))  # so that the first look-up need not index them
            here = prompts if history else _prompts(max(1, calls // _GROUP), 100 + number) * _GROUP
            order = (None, speculation) if number % 2 else (speculation, None)
            taken = {each: engine.seconds(here, f"now{number}", size, each) for each in order}
            (plain, tokens), (ours, _) = taken[None], taken[speculation]
            pairs.append((plain, ours, tokens))
        bar = _BARS.get(size, _LEAST) if kind == "second epoch" and calls < 512 else _LEAST
        found += [_compared(f"{name}, {kind}", pairs[1:], bar), *_counted(f"{name}, {kind}", speculation.counters)]
    return found


def _compared(name: str, pairs: Sequence[tuple[float, float, int]], bar: float) -> Measure:
    """Compare by the median of the ratios of pairs: seconds of plain decoding, ours, and the tokens of both."""
    plain = median(tokens / seconds for seconds, _, tokens in pairs)
    ours = plain * median(seconds / ours for seconds, ours, _ in pairs)
    return compared(name, ours, "tokens/cpu-s", "plain decoding", plain, (at_least("ratio", bar),))


def _counted(name: str, counters: SpeculationCounters) -> list[Measure]:
    drafted, accepted = counters.drafted_token_total, counters.accepted_token_total
    steps, tokens = sum(counters.row_steps), sum(counters.row_tokens)
    return [
        Measure(name=f"{name}: accepted draft tokens", value=accepted / max(1, drafted), unit="of those drafted"),
        Measure(name=f"{name}: tokens of a call a step", value=tokens / max(1, steps), unit="tokens"),
    ]


def _prompts(number: int, seed: int) -> list[Int32Array]:
    rng, tokenizer = random.Random(seed), build_tokenizer()
    return [np.array(tokenizer.encode(draw_puzzle(rng, "train", 5, 8).text).ids, np.int32) for _ in range(number)]
