"""Calls that are not recorded: evaluation, demonstrations, curiosity. They are never trained on."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time

import numpy as np

from rollmesh.agents.answer_stream import AnswerStream, FinishedAnswer
from rollmesh.agents.answer_turn import AnswerTurn
from rollmesh.agents.openai_errors import invalid, unavailable
from rollmesh.agents.parsed_request import ParsedRequest, too_long
from rollmesh.text import Tokenizer
from rollmesh.types import FinishReason, Int32Array, Prompt, Trajectory
from rollmesh.worker.active_trajectory import ActiveTrajectory
from rollmesh.worker.generation_calls import Caller
from rollmesh.worker.generator_pool import GeneratorPool
from rollmesh.worker.routing import Need, able

_WAIT_SECONDS = 30.0
"""Time for a generator to come into service before a call is turned away."""
_PINNED_WAIT_SECONDS = 2.0
"""The same for one policy version: a generator that is pinned to it serves it already."""
_LOOK_SECONDS = 0.05


class UnrecordedCalls:
    """Samples answers outside of the queue, on the run's generators."""

    def __init__(
        self, tokenizer: Tokenizer, caller: Caller, generators: GeneratorPool, *, max_context_tokens: int
    ) -> None:
        self._tokenizer = tokenizer
        self._caller = caller
        self._generators = generators
        self._max_context_tokens = max_context_tokens

    async def start(self, ask: ParsedRequest) -> list[FinishedAnswer]:
        """One answer under way for every choice.

        OpenAiError when the context is too long, or no generator can serve the call.
        """
        context_ids = await asyncio.to_thread(ask.whole_ids)
        left = self._max_context_tokens - len(context_ids)
        if not len(context_ids):
            raise invalid("the context has no tokens", ask.field)
        if left < 1:
            raise too_long(len(context_ids), self._max_context_tokens, ask.field)
        await self._served(ask.pinned_version)
        budget = left if ask.token_limit is None else min(left, ask.token_limit)
        return [self._answer(ask, context_ids, budget, index) for index in range(ask.choices)]

    def _answer(self, ask: ParsedRequest, context_ids: Int32Array, budget: int, index: int) -> FinishedAnswer:
        held = ActiveTrajectory(
            Trajectory(
                trajectory_id=f"{_name(ask, context_ids)}.{index}",
                group_id=f"api-{secrets.token_hex(8)}",
                member_index=index,
                prompt=Prompt(prompt_id="api", token_ids=context_ids, verifier=""),
            )
        )
        turn = AnswerTurn(self._tokenizer, context_ids, ask.stops)
        flow = AnswerStream(turn, 0)
        held.changed = lambda: flow.look(held)

        async def sample() -> FinishReason:
            return await self._caller.sample(held, budget, ask.params, save=None, pinned_version=ask.pinned_version)

        return FinishedAnswer(context_ids=context_ids, turn=turn, deltas=flow.run(sample))

    async def _served(self, pinned_version: int | None) -> None:
        """Wait until some generator can take the call."""
        need = Need(pinned_version=pinned_version)
        deadline = time.monotonic() + (_WAIT_SECONDS if pinned_version is None else _PINNED_WAIT_SECONDS)
        while not any(able(record, need) for record in self._generators.records.values()):
            if time.monotonic() >= deadline:
                raise _nobody(self._generators, pinned_version)
            await asyncio.sleep(_LOOK_SECONDS)


def _nobody(generators: GeneratorPool, pinned_version: int | None) -> Exception:
    serving = sorted({r.policy_version for r in generators.records.values() if r.serving})
    if pinned_version is None or not serving:
        return unavailable("no generator serves a policy right now; try again later", "no_generator", 5.0)
    return unavailable(
        f"no generator serves policy version {pinned_version} right now (served: "
        f"{', '.join(map(str, serving))}); pin it first: POST /api/v1/policies/{pinned_version}/pin",
        "version_not_served",
        5.0,
    )


def _name(ask: ParsedRequest, context_ids: Int32Array) -> str:
    """Sampling noise depends on the seed and this name: with a seed, the same call gets the same noise."""
    if not ask.seeded:
        return f"api-{secrets.token_hex(12)}"
    digest = hashlib.blake2b(np.ascontiguousarray(context_ids, "<i4").tobytes(), digest_size=12).hexdigest()
    return f"api-{digest}"
