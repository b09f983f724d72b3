"""Speculation of the torch engine beside plain decoding of the same calls, with the demo's model and prompts."""

import asyncio
import random
from collections.abc import Callable, Sequence
from itertools import count
from statistics import mean

import numpy as np

from benchmarks.frame import Measure, at_least, compared, interleaved
from rollmesh.config.generator import GeneratorConfig
from rollmesh.config.recipes import recipe_file
from rollmesh.generator.engines.engine_protocol import SpeculationCounters
from rollmesh.generator.engines.torch.torch_engine import TorchEngine
from rollmesh.recipes.countdown.tokenizer import build_tokenizer, stop_token_ids
from rollmesh.tasks.countdown import draw_puzzle
from rollmesh.types import GenerationCall, Int32Array, SamplingParams

SIZES = (1, 4, 8, 32, 64)
_BARS = {1: 1.3, 4: 1.3}
_LEAST = 0.98
_CALLS = 4
"""Calls of a load by running calls; the mixed lengths of the demo's answers are refilled."""
_GROUP, _EPOCH_GROUP = 8, 32
"""Siblings of a prompt; and its answers in the epoch before, which make the history."""
_USELESS_TEMPERATURE = 8.0
_CONTEXT, _CHUNK = 640, 64


def measure(runner: asyncio.Runner, *, quick: bool) -> list[Measure]:
    """Measure every load; ``quick`` has one repetition, and 1 and 4 running calls."""
    measures: list[Measure] = []
    for size in SIZES[:2] if quick else SIZES:
        measures += _load(runner, size, max(8, _CALLS * size), 1 if quick else 5, quick=quick)
    return measures if quick else measures + _load(runner, 64, 512, 3, quick=False, name="512 calls of mixed lengths")


def _load(runner: asyncio.Runner, size: int, calls: int, repeats: int, *, quick: bool, name: str = "") -> list[Measure]:
    """Compare plain decoding with three histories, ``size`` calls at once."""
    prompts, name = _prompts(calls, 1), name or f"{size} running"
    engines = {each: _Engine(runner, each != "plain") for each in ("plain", "second epoch", "useless", "siblings")}
    try:
        for member in range(4 if quick else _EPOCH_GROUP):
            engines["second epoch"].play(prompts, f"before{member}", 64)
            engines["useless"].play(prompts, f"before{member}", 64, temperature=_USELESS_TEMPERATURE)
        before = {each: engine.counters for each, engine in engines.items()}
        numbers = {each: count() for each in engines}
        group = [_prompts(max(1, calls // _GROUP), 100 + number) * _GROUP for number in range(repeats + 2)]

        def work(each: str) -> Callable[[], object]:
            if each == "siblings":
                return lambda: engines[each].play(group[next(numbers[each])], "s", size)
            return lambda: engines[each].play(prompts, f"now{next(numbers[each])}", size)

        engines["plain"].played.clear()
        taken = interleaved({each: work(each) for each in ("plain", "second epoch", "useless")}, repeats)
        tokens = mean(engines["plain"].played)
        engines["plain"].played.clear()
        alone = interleaved({"siblings": work("siblings"), "plain": _again(engines["plain"], group, size)}, repeats)
        found = [
            _compared(f"{name}, second epoch", taken["plain"], taken["second epoch"], tokens, _BARS.get(size, _LEAST)),
            _compared(f"{name}, useless history", taken["plain"], taken["useless"], tokens, _LEAST),
            _compared(
                f"{name}, siblings only", alone["plain"], alone["siblings"], mean(engines["plain"].played), _LEAST
            ),
        ]
        for each in ("second epoch", "useless", "siblings"):
            found += _counted(f"{name}, {each}", before[each], engines[each].counters)
        return found
    finally:
        for engine in engines.values():
            engine.close()


def _again(engine: "_Engine", groups: Sequence[Sequence[Int32Array]], size: int) -> Callable[[], object]:
    numbers = count()
    return lambda: engine.play(groups[next(numbers)], "s", size)


def _compared(name: str, plain: float, ours: float, tokens: float, bar: float) -> Measure:
    return compared(name, tokens / ours, "tokens/cpu-s", "plain decoding", tokens / plain, (at_least("ratio", bar),))


def _counted(name: str, before: SpeculationCounters, after: SpeculationCounters) -> list[Measure]:
    drafted = after.drafted_token_total - before.drafted_token_total
    accepted = after.accepted_token_total - before.accepted_token_total
    steps, tokens = (
        sum(b) - sum(a) for a, b in ((before.row_steps, after.row_steps), (before.row_tokens, after.row_tokens))
    )
    return [
        Measure(name=f"{name}: accepted draft tokens", value=accepted / max(1, drafted), unit="of those drafted"),
        Measure(name=f"{name}: tokens of a call a step", value=tokens / max(1, steps), unit="tokens"),
    ]


def _prompts(number: int, seed: int) -> list[Int32Array]:
    rng, tokenizer = random.Random(seed), build_tokenizer()
    return [np.array(tokenizer.encode(draw_puzzle(rng, "train", 5, 8).text).ids, np.int32) for _ in range(number)]


class _Engine:
    """Engine on the demo's model, whose calls run to their ends."""

    def __init__(self, runner: asyncio.Runner, speculates: bool) -> None:
        self._runner = runner
        self.played: list[int] = []
        """Tokens of each load."""
        self._engine = TorchEngine(
            GeneratorConfig(
                slots=64, max_context_tokens=_CONTEXT, device="cpu", speculation="history" if speculates else "off"
            ),
            several_turns=False,
        )
        runner.run(self._engine.start(recipe_file("countdown", "model"), 0))

    @property
    def counters(self) -> SpeculationCounters:
        return self._engine.status().speculation or SpeculationCounters()

    def play(self, prompts: Sequence[Int32Array], name: str, size: int, *, temperature: float = 1.0) -> None:
        """Answer prompts, ``size`` at once; ``name`` and the place of a prompt are the call's noise."""
        places, stops = asyncio.Semaphore(size), tuple(stop_token_ids())

        async def one(number: int) -> int:
            call = GenerationCall(
                trajectory_id=f"{name}.{number}",
                context_ids=prompts[number],
                prompt_token_count=len(prompts[number]),
                max_new_token_count=512,
                sampling=SamplingParams(temperature=temperature, stop_token_ids=stops),
                chunk_token_count=_CHUNK,
            )
            async with places:
                return sum([len(chunk.token_ids) async for chunk in self._engine.generate(call)])

        async def every() -> int:
            return sum(await asyncio.gather(*map(one, range(len(prompts)))))

        self.played.append(self._runner.run(every()))

    def close(self) -> None:
        self._runner.run(self._engine.aclose())
