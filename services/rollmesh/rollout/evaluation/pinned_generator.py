"""Having one policy version served for the length of an evaluation, while the rest of the mesh goes on.

    consumes     the registry of generators, the desired state
    produces     a pin, renewed until the evaluation is over
    waits for    a pin of a person or of another evaluation to go
    unblocked by whoever holds it

While the run trains, one generator is held back on the version and the others follow the newest one; a paused mesh
has nothing to hold up, so there all generators serve it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from rollmesh.errors import Conflict, StoreUnavailable
from rollmesh.runtime.logging import get_logger
from rollmesh.store import TrajectoryStore
from rollmesh.store.queue_types import EvalRequest
from rollmesh.worker.generator_pool import GeneratorPool
from rollmesh.worker.routing import choose_keeper

_LOOK_SECONDS = 0.5


class Pin:
    """The pin of one evaluation; ``held`` takes it back at the end."""

    def __init__(self, store: TrajectoryStore, generators: GeneratorPool, request: EvalRequest) -> None:
        self._store = store
        self._generators = generators
        self._request = request
        self._keeper = ""
        self._waits = False
        self._log = get_logger("evaluation")

    @property
    def waits(self) -> bool:
        """Whether somebody else's pin is in force now."""
        return self._waits

    @property
    def slot_count(self) -> int:
        """Calls that the evaluation may run at once: all slots of a paused mesh, else half of one generator's."""
        keeper = self._generators.records.get(self._keeper)
        if keeper is None:
            return max(1, self._generators.serving_slots)
        return max(1, keeper.slot_count // 2)

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[bool]:
        """Wait for the pin and renew it inside the block; yields False when there is no such version."""
        if not await self._taken():
            yield False
            return
        renewing = asyncio.create_task(self._renew(), name="pin")
        try:
            yield True
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
            await self._store.pin_policy(None, owner=self._request.evaluation_id)

    async def _taken(self) -> bool:
        while not await self._pin():
            if await self._store.policy(self._request.policy_version) is None:
                return False
            await asyncio.sleep(_LOOK_SECONDS)
        return True

    async def _renew(self) -> None:
        """Pin again and again: the generator may go, a person may unpin, Redis may come back as it was before."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                await self._pin()
            except StoreUnavailable as error:
                self._log.warning("pin_not_renewed", message=str(error))

    async def _pin(self) -> bool:
        """Pin once; False while somebody else's pin or a missing generator is in the way."""
        version = self._request.policy_version
        paused = (await self._store.desired()).paused
        keeper = choose_keeper(list(self._generators.records.values()), version, self._keeper)
        if keeper is None and not paused:
            return False
        self._keeper = "" if paused or keeper is None else keeper.instance_id
        try:
            await self._store.pin_policy(version, owner=self._request.evaluation_id, instance_id=self._keeper)
        except Conflict as error:
            if not self._waits:
                self._log.warning("evaluation_waits", evaluation=self._request.evaluation_id, message=str(error))
            self._waits = True
            return False
        self._waits = False
        return True
