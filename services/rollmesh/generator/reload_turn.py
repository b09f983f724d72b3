"""Turn of a generator to load a policy, by a lease that is renewed while it loads."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Sequence

from rollmesh.errors import StoreUnavailable
from rollmesh.generator.generator_metrics import GeneratorMetrics
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tasks import cancel_and_wait
from rollmesh.store.generator_registry import ReloadHolder, ReloadLeases

_RENEWALS = 3
"""Renewals within one time to live."""
_LAST_RENEWAL_SECONDS = 1.0
"""Time for a renewal on its way at the end of a load: applied after the end, it would leave a lease behind."""


class ReloadTurns:
    """Turns of one generator; without ``at_once`` every load begins at once and Redis is not asked."""

    def __init__(
        self, leases: ReloadLeases, instance_id: str, metrics: GeneratorMetrics, *, at_once: int | None, ttl: float
    ) -> None:
        self._leases = leases
        self._instance_id = instance_id
        self._metrics = metrics
        self._at_once = at_once
        self._ttl = ttl
        self._waiting_since: float | None = None
        self._log = get_logger("reload_turn")

    @contextlib.asynccontextmanager
    async def turn(self, policy_version: int, *, urgent: bool) -> AsyncIterator[bool]:
        """Hold a turn for the block; yields False if other generators load and this one must ask again later.

        An ``urgent`` load never waits, but counts for the others. The lease of a killed generator ends with its time
        to live, so a wait lasts at most as long as the loads of the holders, or that time.
        """
        if self._at_once is None:
            yield True
            return
        token = f"{self._instance_id}:{secrets.token_hex(16)}"
        holders = await self._leases.begin(token, at_once=self._at_once, ttl=self._ttl, above_limit=urgent)
        if holders:
            self._note_wait(policy_version, holders)
            yield False
            return
        self._end_wait()
        loaded = asyncio.Event()
        renewing = asyncio.create_task(self._renew(token, self._at_once, loaded), name="reload-lease")
        try:
            yield True
        finally:
            loaded.set()
            await asyncio.wait({renewing}, timeout=_LAST_RENEWAL_SECONDS)
            await cancel_and_wait(renewing)
            # Its time to live ends the lease if the store is unreachable.
            with contextlib.suppress(StoreUnavailable):
                await self._leases.end(token)

    def clear(self) -> None:
        """Stop waiting, because there is nothing to load any more."""
        self._waiting_since = None
        self._metrics.reload_waiting.set(0)

    async def _renew(self, token: str, at_once: int, loaded: asyncio.Event) -> None:
        while not loaded.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._ttl / _RENEWALS):
                    await loaded.wait()
                    return
            with contextlib.suppress(StoreUnavailable):
                # Above the limit: a lease that has expired meanwhile must count again, since the load goes on.
                await self._leases.begin(token, at_once=at_once, ttl=self._ttl, above_limit=True)

    def _note_wait(self, policy_version: int, holders: Sequence[ReloadHolder]) -> None:
        if self._waiting_since is not None:
            return
        self._waiting_since = time.monotonic()
        self._metrics.reload_waiting.set(1)
        self._log.info(
            "reload_waits",
            policy_version=policy_version,
            for_generators=[holder.token.partition(":")[0] for holder in holders],
            lease_seconds=round(max(holder.seconds_left for holder in holders), 3),
        )

    def _end_wait(self) -> None:
        waited = 0.0 if self._waiting_since is None else time.monotonic() - self._waiting_since
        self._metrics.reload_wait_seconds.observe(waited)
        self.clear()
