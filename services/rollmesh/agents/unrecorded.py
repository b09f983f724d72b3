"""Calls without a session: never recorded and never trained on."""

import asyncio
import hashlib
import secrets

import numpy as np

from rollmesh.agents.answer_stream import AnswerInProgress, AnswerStream, AnswerTurn
from rollmesh.agents.openai_errors import invalid, unavailable
from rollmesh.agents.parsed_request import ParsedRequest, too_long
from rollmesh.errors import NoGenerator
from rollmesh.text import Tokenizer
from rollmesh.types import FinishReason, Int32Array, Prompt, Trajectory
from rollmesh.worker.active_trajectory import ActiveTrajectory
from rollmesh.worker.generation_calls import Caller
from rollmesh.worker.generator_pool import GeneratorPool

_UNSERVED_SECONDS = 30.0
"""Time without a generator in service after which a call is rejected."""
_UNSERVED_PINNED_SECONDS = 2.0
"""Shorter time for one policy version: a pinned generator already serves it."""


class UnrecordedCalls:
    """Sampler of answers outside the queue, on the generators of the run."""

    def __init__(
        self, tokenizer: Tokenizer, caller: Caller, generators: GeneratorPool, max_context_tokens: int
    ) -> None:
        self._tokenizer = tokenizer
        self._caller = caller
        self._generators = generators
        self._max_context_tokens = max_context_tokens

    async def start(self, request: ParsedRequest) -> list[AnswerInProgress]:
        """Return one answer in progress per choice.

        Raises OpenAiError if the context is empty or too long. An answer raises it while no generator can serve it.
        """
        context_ids = await asyncio.to_thread(request.whole_ids)
        left = self._max_context_tokens - len(context_ids)
        if not len(context_ids):
            raise invalid("the context has no tokens; send at least one", request.field)
        if left < 1:
            raise too_long(len(context_ids), self._max_context_tokens, request.field)
        budget = left if request.token_limit is None else min(left, request.token_limit)
        return [self._answer(request, context_ids, budget, index) for index in range(request.choices)]

    def _answer(self, request: ParsedRequest, context_ids: Int32Array, budget: int, index: int) -> AnswerInProgress:
        active = ActiveTrajectory(
            Trajectory(
                trajectory_id=f"{_name(request, context_ids)}.{index}",
                group_id=f"api-{secrets.token_hex(8)}",
                member_index=index,
                prompt=Prompt(prompt_id="api", token_ids=context_ids, verifier=""),
            )
        )
        turn = AnswerTurn(self._tokenizer, context_ids, request.stops)
        stream = AnswerStream(turn, 0, texts=request.texts)
        active.observe(stream.update)

        pinned = request.pinned_version
        unserved_seconds = _UNSERVED_SECONDS if pinned is None else _UNSERVED_PINNED_SECONDS

        async def sample() -> FinishReason:
            try:
                return await self._caller.sample(
                    active, budget, request.params, save=None, pinned_version=pinned, unserved_seconds=unserved_seconds
                )
            except NoGenerator as error:
                raise _unserved(self._generators, pinned) from error

        return AnswerInProgress(context_ids=context_ids, turn=turn, deltas=stream.run(sample))


def _unserved(generators: GeneratorPool, pinned_version: int | None) -> Exception:
    serving = sorted({r.policy_version for r in generators.records.values() if r.serving})
    if pinned_version is None or not serving:
        return unavailable("no generator serves a policy; retry later", "no_generator", 5.0)
    return unavailable(
        f"no generator serves policy version {pinned_version} (served: "
        f"{', '.join(map(str, serving))}); pin it first: rollmesh pin RUN --version {pinned_version}, or POST "
        f"/api/v1/policies/{pinned_version}/pin at the gateway",
        "version_not_served",
        5.0,
    )


def _name(request: ParsedRequest, context_ids: Int32Array) -> str:
    """Return the trajectory id, from which the sampling noise is derived: with a seed, equal calls get equal noise."""
    if not request.seeded:
        return f"api-{secrets.token_hex(12)}"
    digest = hashlib.blake2b(np.ascontiguousarray(context_ids, "<i4").tobytes(), digest_size=12).hexdigest()
    return f"api-{digest}"
