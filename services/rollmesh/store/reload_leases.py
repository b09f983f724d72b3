"""Leases to load a policy: at most so many generators of a run load one at the same time."""

from __future__ import annotations

from dataclasses import dataclass

from rollmesh.store.redis_connection import Connection


@dataclass(frozen=True, slots=True, kw_only=True)
class ReloadHolder:
    """One lease that stands in the way of another."""

    token: str
    seconds_left: float
    """Seconds until the lease ends unless its generator renews it."""


class ReloadLeases:
    """The leases of one run; each is a random token that ends with its time to live."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def begin(self, token: str, *, at_once: int, ttl: float, above_limit: bool = False) -> list[ReloadHolder]:
        """Take a lease for ``ttl`` seconds or renew it; returns up to 16 holders while ``at_once`` others hold one.

        A lease taken ``above_limit`` counts for the others. A repeated call of the same token renews its lease.
        """
        held, *rows = await self._connection.run(
            "begin_reload", token, at_once, int(1000 * ttl), "1" if above_limit else "0"
        )
        if held:
            return []
        return [
            ReloadHolder(token=name.decode(), seconds_left=int(left) / 1000)
            for name, left in zip(rows[::2], rows[1::2], strict=True)
        ]

    async def end(self, token: str) -> bool:
        """End a lease; returns False when it had ended already."""
        return bool(await self._connection.run("end_reload", token))
