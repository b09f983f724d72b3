"""Calls of agents through the agents service, beside the same calls sent straight to the generator.

200 sessions at once, each of 6 turns that end with the call of a tool; a tool takes two to four seconds. The baseline
sends the contexts of such sessions to the same generator as token ids, with the same times in tools. The two are played
in turn, each alone, in four rounds, and every second round begins with the other one. The overhead of a round is the
median (p99) of its calls through the service less that of its calls to the generator: it also has what the service
takes from the generator, which shares the processors with it. The measure is the mean of the rounds.

Two times of one call are not compared. The generator takes and answers calls at every fourth step, so most of such
differences are 0 and the others 40 ms, whatever the overhead: their median hides it.

The generator's step lasts 10 ms, as that of a larger model does. Without time in tools the service is the limit.

Memory is that of the service's process while 10,000 sessions of one call each come and go.
"""

import asyncio
import itertools
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.agents_run import CHUNK_TOKENS, RESULT, SYSTEM, TOOLS, AgentsRun, agents_run
from benchmarks.frame import Measure, Quick, at_least, at_most, compared
from benchmarks.workloads import make_call
from rollmesh.errors import RollmeshError
from rollmesh.types import Int32Array
from rollmesh.wire.generation_client import GenerationClient

SESSIONS, TURNS, ROUNDS, MEMORY_SESSIONS = 200, 6, 4, 10_000
_TOOL_SECONDS = (2.0, 4.0)
_MEMORY_STEPS = 4
_AT_ONCE = 50
"""Sessions at once while memory is measured."""
_NAME_IDS = 100
"""Token ids of names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One call."""

    seconds: float
    context_tokens: int
    answer_tokens: int
    cached_tokens: int
    context_ids: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    """Ids of the context, where they are wanted."""


Played = list[list[Turn]]
"""Turns by session."""


def run(*, quick: Quick = False) -> list[Measure]:
    """Measure; ``quick`` plays 16 sessions of 3 turns in two rounds, and 80 for the memory."""
    sessions, turns, rounds, many = (16, 3, 2, 80) if quick else (SESSIONS, TURNS, ROUNDS, MEMORY_SESSIONS)
    with tempfile.TemporaryDirectory(prefix="rollmesh-bench-") as name:
        return asyncio.run(_measure(Path(name), sessions, turns, rounds, many))


async def _measure(folder: Path, sessions: int, turns: int, rounds: int, many: int) -> list[Measure]:
    total = (rounds + 2) * sessions + many
    async with agents_run(folder, sessions=total, at_once=sessions) as scene, GenerationClient() as client:
        agents = Agents(scene)
        warm_up, _ = await _play(agents.play, sessions, turns, tools=False, ids=True)
        bare = Bare(scene, client, warm_up)
        ours: list[Played] = []
        theirs: list[Played] = []
        plays, before = [(agents.play, ours), (bare.play, theirs)], _cpu_seconds(scene.pid)
        for _ in range(rounds):
            for play, into in plays:
                into.append((await _play(play, sessions, turns, tools=True))[0])
            plays.reverse()
        cpu = (_cpu_seconds(scene.pid) - before) / (rounds * sessions * turns)
        _, busy = await _play(agents.play, sessions, turns, tools=False)
        _, bare_busy = await _play(bare.play, sessions, turns, tools=False)
        memory = await _memory(agents, scene.pid, many)
    rates = [sessions * turns / seconds for seconds in (busy, bare_busy)]
    rate = compared("calls without time in tools", rates[0], "calls/s", "the generator alone", rates[1])
    own = Measure(name="processor time of the service, a call, its idle time included", value=1000 * cpu, unit="ms")
    return [*_overheads(ours, theirs), own, rate, _cached_share(ours), memory]


def _cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def _overheads(ours: Sequence[Played], theirs: Sequence[Played]) -> list[Measure]:
    """Return the times of a call through the service and straight to the generator, and their differences by round."""
    times = np.array([[[turn.seconds for own in played for turn in own] for played in arm] for arm in (ours, theirs)])
    found = np.percentile(1000 * times, [50, 99], axis=-1)  # [percentile, arm, round]
    p50, p99 = found[:, 0] - found[:, 1]
    medians = found[0].mean(-1)
    error = p50.std(ddof=1) / len(p50) ** 0.5
    name = "overhead of a call, p50"
    return [
        compared(
            "a call in a session, p50", float(medians[0]), "ms", "such a call to the generator", float(medians[1])
        ),
        Measure(name=name, value=float(p50.mean()), unit="ms", bars=(at_most("value", 10.0),)),
        Measure(name=f"{name}, standard error of {len(p50)} rounds", value=float(error), unit="ms"),
        Measure(name="overhead of a call, p99", value=float(p99.mean()), unit="ms"),
    ]


def _cached_share(service: list[Played]) -> Measure:
    """Compare what later turns found with what their session had left: all but the last token of its answer."""
    found = possible = 0
    for own in (own for played in service for own in played):
        for before, turn in itertools.pairwise(own):
            found += turn.cached_tokens
            possible += before.context_tokens + before.answer_tokens - 1
    share = found / possible
    return Measure(
        name="context found in the prefix cache, of what the session has left there",
        value=share,
        unit="share",
        bars=(at_least("value", 0.9),),
    )


async def _memory(agents: "Agents", pid: int, many: int) -> Measure:
    """Return the memory of the service after all sessions, beside that after the first quarter of them."""
    sizes, service = [], psutil.Process(pid)
    for step in range(_MEMORY_STEPS):
        ahead = iter(range(step * many // _MEMORY_STEPS, (step + 1) * many // _MEMORY_STEPS))

        async def work(numbers: Any = ahead) -> None:
            for number in numbers:
                await agents.play(number, 1, tools=False)

        await asyncio.gather(*(work() for _ in range(_AT_ONCE)))
        sizes.append(service.memory_info().rss / 2**20)
    name = f"memory of the service after {many:,} sessions"
    return compared(name, sizes[-1], "MiB", f"after {many // _MEMORY_STEPS:,}", sizes[0], (at_most("ratio", 1.1),))


async def _play(play: Any, sessions: int, turns: int, *, tools: bool, ids: bool = False) -> tuple[Played, float]:
    """Play sessions at once; return their turns and the seconds that all of them took."""
    started = time.perf_counter()
    options = {"ids": True} if ids else {}
    played = await asyncio.gather(*(play(number, turns, tools=tools, **options) for number in range(sessions)))
    return list(played), time.perf_counter() - started


async def _use_tool(number: int, turn: int, tools: bool) -> None:
    """Spend the time of a tool: the same in every run of the bench, other in every turn of every session."""
    if tools:
        await asyncio.sleep(np.random.default_rng((number, turn)).uniform(*_TOOL_SECONDS))


class Agents:
    """Agents that play sessions through the service."""

    def __init__(self, scene: AgentsRun) -> None:
        self._http = scene.http
        self._journeys = itertools.count(1000)
        """A name for each session: none finds what an earlier one with its words has left in the cache."""

    async def play(self, number: int, turns: int, *, tools: bool, ids: bool = False) -> list[Turn]:
        """Play a session: open it, call a tool in every turn, and post the reward."""
        session = await self._post("/sessions", {"wait_seconds": 120})
        key = {"Authorization": f"Bearer {session['api_key']}"}
        messages = [SYSTEM, {"role": "user", "content": f"journey number {next(self._journeys)}"}]
        body = {"model": session["model"], "messages": messages, "tools": TOOLS, "return_token_ids": ids}
        played = []
        for turn in range(turns):
            await _use_tool(number, turn, tools)
            started = time.perf_counter()
            answer = await self._post("/chat/completions", body, key)
            seconds = time.perf_counter() - started
            message, usage = answer["choices"][0]["message"], answer["usage"]
            (call,) = message["tool_calls"]
            messages.append({name: message[name] for name in ("role", "content", "tool_calls") if name in message})
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"{RESULT} on day {turn}"})
            played.append(
                Turn(
                    seconds=seconds,
                    context_tokens=usage["prompt_tokens"],
                    answer_tokens=usage["completion_tokens"],
                    cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
                    context_ids=np.array(answer.get("prompt_token_ids", ()), np.int32),
                )
            )
        await self._post(f"/sessions/{session['id']}/reward", {"reward": float(number % 2)})
        return played

    async def _post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
        async with self._http.post(path.removeprefix("/"), json=body, headers=headers) as response:
            if not response.ok:
                raise RollmeshError(f"{path}: {response.status} {await response.text()}")
            return await response.json()


class Bare:
    """Baseline: the same calls as token ids, to the generator.

    Each session has a name of three tokens where the first contexts differ: like those of ``Agents``, it finds in the
    prefix cache nothing that an earlier one with its words has left there.
    """

    def __init__(self, scene: AgentsRun, client: GenerationClient, warm_up: Played) -> None:
        self._record = scene.generator
        self._client = client
        self._warm_up = warm_up
        first, second = (own[0].context_ids for own in warm_up[:2])
        self._shared = int(np.argmin(first == second))
        self._names = itertools.product(range(_NAME_IDS, 2 * _NAME_IDS), repeat=3)

    async def play(self, number: int, turns: int, *, tools: bool) -> list[Turn]:
        """Send the calls of a session."""
        played, name = [], next(self._names)
        for at, turn in enumerate(self._warm_up[number][:turns]):
            await _use_tool(number, at, tools)
            context = np.insert(turn.context_ids, self._shared, name)
            call = make_call(f"bare-{name}", context, turn.answer_tokens, chunk_tokens=CHUNK_TOKENS)
            started = time.perf_counter()
            async for _ in self._client.generate(self._record, call):
                pass
            played.append(replace(turn, seconds=time.perf_counter() - started))
        return played
