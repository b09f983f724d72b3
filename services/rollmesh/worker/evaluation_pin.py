"""Pin of one policy version for the duration of an evaluation.

    consumes     the registry of generators, the pauses of the run
    produces     a pin, renewed until the evaluation ends
    waits for    the release of a pin by an operator or another evaluation
    unblocked by the owner of that pin

While the run trains, one generator stays on the pinned version and the others follow the newest one. While an operator
or the launcher pauses the run, and after its last train step, all generators serve the pinned version.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from rollmesh.errors import Conflict, StoreUnavailable
from rollmesh.runtime.health import Waits
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tasks import cancel_and_wait
from rollmesh.store import TrajectoryStore
from rollmesh.store.queue_types import EvalRequest
from rollmesh.worker.generator_pool import GeneratorPool
from rollmesh.worker.routing import choose_pinned, refused_by_all

_LOOK_SECONDS = 0.5
_OPERATION = "evaluation"


class Pin:
    """Pin of one evaluation; ``held`` releases it at the end."""

    def __init__(
        self, store: TrajectoryStore, generators: GeneratorPool, request: EvalRequest, shown_waits: Waits
    ) -> None:
        """Build a pin; what it waits for is one of ``shown_waits``."""
        self._store = store
        self._generators = generators
        self._request = request
        self._shown_waits = shown_waits
        self._pinned_instance = ""
        self.waits = False
        """True while a pin of another owner is in force."""
        self._log = get_logger("evaluation")

    @property
    def refusal(self) -> str:
        """Reason why the pinned generators have tried the version and refuse it; empty while one may serve it."""
        records = list(self._generators.records.values())
        pinned = [record for record in records if record.instance_id == self._pinned_instance] or records
        refusing = refused_by_all(self._request.policy_version, pinned)
        return "" if refusing is None or not refusing.refused_count else refusing.refused_reason

    @property
    def slot_count(self) -> int:
        """Most calls of the evaluation at once: all slots if all generators are pinned, else half of one's."""
        pinned = self._generators.records.get(self._pinned_instance)
        if pinned is None:
            return max(1, self._generators.serving_slots)
        return max(1, pinned.slot_count // 2)

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[bool]:
        """Wait for the pin and renew it inside the block; yields False if the version does not exist."""
        try:
            if not await self._taken():
                yield False
                return
            renewing = asyncio.create_task(self._renew(), name="pin")
            try:
                yield True
            finally:
                await cancel_and_wait(renewing)
                await self._store.policies.pin(None, owner=self._request.evaluation_id)
        finally:
            self._shown_waits.end(_OPERATION)

    async def _taken(self) -> bool:
        while not await self._pin():
            if await self._store.policies.get(self._request.policy_version) is None:
                return False
            await asyncio.sleep(_LOOK_SECONDS)
        return True

    async def _renew(self) -> None:
        """Renew the pin: the generator may leave, an operator may unpin, Redis may be restored to an earlier state."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                await self._pin()
            except StoreUnavailable as error:
                self._log.warning("pin_not_renewed", message=str(error))

    async def _pin(self) -> bool:
        """Pin once; returns False while another owner's pin is in force or no generator serves."""
        version = self._request.policy_version
        view = await self._store.mesh.view(groups=False)
        # At a barrier the mesh rests too, but the other generators need the next policy.
        pins_all = view.user_paused or view.launcher_paused or view.is_complete
        pinned = choose_pinned(list(self._generators.records.values()), version, self._pinned_instance)
        if pinned is None and not pins_all:
            self._show("no generator serves")
            return False
        self._pinned_instance = "" if pins_all or pinned is None else pinned.instance_id
        try:
            await self._store.policies.pin(
                version, owner=self._request.evaluation_id, instance_id=self._pinned_instance
            )
        except Conflict as error:
            if not self.waits:
                self._log.warning("evaluation_waits", evaluation=self._request.evaluation_id, message=str(error))
            self.waits = True
            self._show(f"{error}; rollmesh pin RUN --release ends the pin of an operator")
            return False
        self.waits = False
        self._shown_waits.end(_OPERATION)
        return True

    def _show(self, reason: str) -> None:
        version = self._request.policy_version
        self._shown_waits.begin(_OPERATION, f"the evaluation of policy version {version}: {reason}")
