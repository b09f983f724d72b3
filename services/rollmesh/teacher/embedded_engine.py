"""The embedded engine: the learner's scorer in one thread, which packs the sequences of all calls together."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import torch

from rollmesh.errors import EngineError
from rollmesh.runtime.tasks import cancel_and_wait
from rollmesh.teacher.teacher_engine import ScoreRequest, TokenScores, fail
from rollmesh.trainer.learner.policy_scorer import PolicyScorer

_ROUND_PASSES = 4
"""Token budgets of what is packed together: more would delay sequences that arrive meanwhile."""


@dataclass(slots=True)
class _Waiting:
    request: ScoreRequest
    result: asyncio.Future[TokenScores]


class EmbeddedEngine:
    """Engine in this process. While a pass runs, the sequences of all calls gather for the next one."""

    def __init__(self, scorer: PolicyScorer, token_budget: int) -> None:
        self._scorer = scorer
        self._budget = token_budget
        self._waiting: list[_Waiting] = []
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="teacher")
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Score within the block."""
        loop = asyncio.create_task(self._run(), name="teacher-passes")
        try:
            yield
        finally:
            await cancel_and_wait(loop)
            self._thread.shutdown()

    async def score(self, request: ScoreRequest) -> TokenScores:
        """Score a sequence with those that wait beside it."""
        if self.failed.done():
            self.failed.result()
        waiting = _Waiting(request, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._arrived.set()
        return await waiting.result

    async def _run(self) -> None:
        try:
            while True:
                await self._arrived.wait()
                self._arrived.clear()
                while together := self._next_round():
                    await self._score(together)
        except torch.OutOfMemoryError as error:
            self._end(
                EngineError(
                    f"a pass does not fit into the memory of the device: lower tokens_per_microbatch "
                    f"of the teacher, now {self._budget}, or its top_k: {error}"
                )
            )
        except Exception as error:  # of any library: the next pass would fail too
            self._end(EngineError(f"the teacher's model failed: {error!r}"), error)

    def _end(self, failure: EngineError, cause: Exception | None = None) -> None:
        failure.__cause__ = cause
        fail(self.failed, failure)
        for waiting in self._waiting:
            if not waiting.result.done():
                waiting.result.set_exception(failure)

    def _next_round(self) -> list[_Waiting]:
        """Choose what is packed together: the oldest sequences with equal settings, whose calls still wait."""
        self._waiting = [waiting for waiting in self._waiting if not waiting.result.done()]
        chosen: list[_Waiting] = []
        tokens = 0
        for waiting in self._waiting:
            first, request = self._waiting[0].request, waiting.request
            if (request.temperature, request.top_k) == (first.temperature, first.top_k):
                chosen.append(waiting)
                tokens += len(request.token_ids)
                if tokens >= _ROUND_PASSES * self._budget:
                    break
        return chosen

    async def _score(self, together: list[_Waiting]) -> None:
        """Score sequences pass by pass; each has its scores at the end of its own pass."""
        loop = asyncio.get_running_loop()
        sequences = [waiting.request.token_ids for waiting in together]
        settings = together[0].request.temperature, together[0].request.top_k
        for indices in await loop.run_in_executor(self._thread, self._scorer.passes, sequences):
            ids = [sequences[i] for i in indices]
            prompts = [together[i].request.prompt_token_count for i in indices]
            one_pass = partial(self._scorer.response_scores, ids, prompts, *settings)
            for i, scores in zip(indices, await loop.run_in_executor(self._thread, one_pass), strict=True):
                if not together[i].result.done():
                    logprobs, top_ids, top_logprobs = scores
                    scored = TokenScores(logprobs=logprobs, top_ids=top_ids, top_logprobs=top_logprobs)
                    together[i].result.set_result(scored)
