"""Calls of agents through the agents service, beside the same calls sent straight to the generator.

200 sessions at once, each of 6 turns that end with the call of a tool; a tool takes two to four seconds. The baseline
sends the contexts of such sessions to the same generator as token ids, with the same times in tools. The two are played
in turn, each alone, in four rounds, and every second round begins with the other one. The time of a call outside the
generator is that at the client less that in the generator, which traces its calls. The overhead is how much more of it
a call through the service has: all that service and Redis add. What they take from the generator, which shares the
processors with them, shows in the whole time of a call.

The generator's step lasts 10 ms, as that of a larger model does. Without time in tools the service is the limit.

Memory is that of the service's process while 10,000 sessions of one call each come and go.
"""

import asyncio
import itertools
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.agents_run import CHUNK_TOKENS, RESULT, SYSTEM, TOOLS, AgentsRun, agents_run
from benchmarks.frame import Measure, Quick, at_least, at_most, compared
from benchmarks.otlp_collector import Collector
from benchmarks.workloads import make_call
from rollmesh.errors import RollmeshError
from rollmesh.runtime.spans import traceparent_of
from rollmesh.types import Float64Array, Int32Array
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
    """One call; ``begin`` and ``end`` are Unix nanoseconds."""

    begin: int
    end: int
    trajectory_id: str
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
        ours: Played = []
        theirs: Played = []
        plays, before = [(agents.play, ours), (bare.play, theirs)], _cpu_seconds(scene.pid)
        for _ in range(rounds):
            for play, into in plays:
                into += (await _play(play, sessions, turns, tools=True))[0]
            plays.reverse()
        cpu = (_cpu_seconds(scene.pid) - before) / (rounds * sessions * turns)
        _, busy = await _play(agents.play, sessions, turns, tools=False)
        _, bare_busy = await _play(bare.play, sessions, turns, tools=False)
        memory = await _memory(agents, scene.pid, many)
    rates = [sessions * turns / seconds for seconds in (busy, bare_busy)]
    rate = compared("calls without time in tools", rates[0], "calls/s", "the generator alone", rates[1])
    own = Measure(name="processor time of the service, a call, its idle time included", value=1000 * cpu, unit="ms")
    # The run has ended, and with it the generator has sent its last traces.
    return [*_overheads(ours, theirs, _generations(scene.traces)), own, rate, _cached_share(ours), memory]


def _cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def _generations(traces: Collector) -> dict[str, list[tuple[int, int]]]:
    """Return the begin and end of every call in the generator, by trajectory."""
    calls = defaultdict[str, list[tuple[int, int]]](list)
    for span in traces.spans:
        if span.name == "generate":
            calls[span.attributes["rollmesh.trajectory"]].append((span.start_ns, span.end_ns))
    return calls


def _overheads(ours: Played, theirs: Played, generations: dict[str, list[tuple[int, int]]]) -> list[Measure]:
    """Return the times of a call through the service and straight to the generator, and those outside the generator."""

    def percentiles(played: Played) -> tuple[float, Float64Array]:
        turns = [turn for own in played for turn in own]
        whole = np.array([turn.end - turn.begin for turn in turns]) / 1e6
        inside = [
            sum(end - begin for begin, end in generations[turn.trajectory_id] if turn.begin <= begin <= turn.end) / 1e6
            for turn in turns
        ]
        if min(inside) == 0:
            raise RollmeshError(f"{inside.count(0)} of {len(turns)} calls are in no trace of the generator")
        return float(np.percentile(whole, 50)), np.percentile(whole - inside, [50, 99])

    (whole, outside), (bare, bare_outside) = percentiles(ours), percentiles(theirs)
    p50, p99 = outside - bare_outside
    baseline = "such a call to the generator"
    return [
        compared("a call in a session, p50", whole, "ms", baseline, bare),
        compared("of it outside the generator, p50", outside[0], "ms", baseline, bare_outside[0]),
        Measure(name="overhead of a call, p50", value=p50, unit="ms", bars=(at_most("value", 10.0),)),
        Measure(name="overhead of a call, p99", value=p99, unit="ms"),
    ]


def _cached_share(played: Played) -> Measure:
    """Compare what later turns found with what their session had left: all but the last token of its answer."""
    found = possible = 0
    for own in played:
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
            begin = time.time_ns()
            answer = await self._post("/chat/completions", body, key)
            end = time.time_ns()
            message, usage = answer["choices"][0]["message"], answer["usage"]
            (call,) = message["tool_calls"]
            messages.append({name: message[name] for name in ("role", "content", "tool_calls") if name in message})
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"{RESULT} on day {turn}"})
            played.append(
                Turn(
                    begin=begin,
                    end=end,
                    trajectory_id=answer["rollmesh"]["trajectory"],
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
        played, inserted = [], next(self._names)
        name = f"bare-{inserted}"
        for at, turn in enumerate(self._warm_up[number][:turns]):
            await _use_tool(number, at, tools)
            context = np.insert(turn.context_ids, self._shared, inserted)
            call = make_call(name, context, turn.answer_tokens, chunk_tokens=CHUNK_TOKENS)
            begin = time.time_ns()
            async for _ in self._client.generate(self._record, call, traceparent=traceparent_of("bench", name)):
                pass
            played.append(replace(turn, begin=begin, end=time.time_ns(), trajectory_id=name))
        return played
