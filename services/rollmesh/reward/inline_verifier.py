"""The verifier of a user's code inside the service's process, where a debugger stops in it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from rollmesh.reward.pool.worker_process import RewardHandler
from rollmesh.types import RewardOutcome
from rollmesh.wire.reward_messages import outcome_from_bytes


class InlineVerifier:
    """Scorer of one answer at a time in a thread, without a time limit."""

    def __init__(self, handler: RewardHandler) -> None:
        self._handler = handler
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="verifier")

    async def score(self, payload: bytes) -> RewardOutcome:
        """Score one encoded item."""
        return outcome_from_bytes(
            await asyncio.get_running_loop().run_in_executor(self._thread, self._handler, payload)
        )

    async def aclose(self) -> None:
        """Drop waiting answers; the answer in progress ends in its thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)
