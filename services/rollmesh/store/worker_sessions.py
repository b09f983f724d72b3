"""Worker sessions, and what happens to their work when they or the server die."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from rollmesh.store.queue_types import HeldTokens, ReRegistered
from rollmesh.store.redis_connection import Argument, Connection

_SLICE = 128


class Sessions:
    """Sessions of rollout workers and their recovery."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def open_session(self, worker: str) -> str:
        """A new session: a random 128-bit token that every write of the worker carries."""
        token = secrets.token_hex(16)
        await self._connection.run("open_session", token, worker)
        return token

    async def heartbeat(self, session: str) -> str:
        """Renew a session; SessionLost when it is closed or was reaped.

        Returns the run_id of the server. When it is not the one of the last heartbeat, Redis has come back, possibly
        as an earlier state: call ``reregister`` with everything the session holds.
        """
        reply: bytes = await self._connection.run("heartbeat", session)
        return reply.decode()

    async def held_by(self, session: str) -> set[str]:
        """Ids of the trajectories that a session holds."""
        members = await self._connection.command("SMEMBERS", self._connection.keys.of("held", session))
        return {member.decode() for member in members}

    async def close_session(self, session: str) -> None:
        """End a session; what it holds goes back to the queue at once and does not count as an attempt."""
        await self.give_back(session, counts_as_attempt=False)

    async def give_back(self, session: str, *, counts_as_attempt: bool) -> int:
        """Give back, slice by slice, what a closed or dead session holds; returns how many trajectories."""
        total = 0
        while True:
            given = int(await self._connection.run("close_session", session, _SLICE, int(not counts_as_attempt)))
            total += given
            if not given:
                return total

    async def server_run_id(self) -> str:
        """run_id of the server as it is now."""
        info = await self._connection.command("INFO", "server")
        return str(info["run_id"])

    async def begin_recovery(self) -> bool:
        """Open a recovery when the server is a new one; True while a recovery is going on.

        Every fenced script does the same by itself; this call only makes it happen now.
        """
        recovering, _ = await self._connection.run("begin_recovery")
        return bool(recovering)

    async def mark_clean_shutdown(self) -> None:
        """Announce an orderly stop of the server, after all clients have stopped: no recovery at its next start."""
        await self._connection.run("mark_clean")

    async def reregister(self, session: str, held: Sequence[HeldTokens], worker: str = "") -> list[ReRegistered]:
        """State everything the session holds, after Redis came back or the session was replaced.

        What is not named goes back to the queue. A trajectory is kept only where the tokens in the queue are the first
        ones of those stated, of the same incarnation. A session that Redis has forgotten is opened again while the
        recovery lasts; after it, SessionLost. Then re-send the tokens after ``saved_token_count`` of the kept ones and
        drop the others: they are regenerated.
        """
        keys = self._connection.keys
        saved = await self._connection.commands(
            [("HGET", keys.of("trajectory", h.trajectory_id), "tokens") for h in held], "reregister"
        )
        words: list[Argument] = []
        for each, raw in zip(held, saved, strict=True):
            tokens = int(raw or 0)
            # Of tokens that it does not have, the worker has no digest. Asked after the read: a save may have been
            # in progress.
            digest = str(each.digest_at(tokens)) if tokens <= each.token_count() else "-"
            words += [each.trajectory_id, each.incarnation, tokens, digest]
        reply = await self._connection.run("reregister", session, worker, *words)
        return [
            ReRegistered(trajectory_id=h.trajectory_id, kept=bool(reply[2 * at]), saved_token_count=reply[2 * at + 1])
            for at, h in enumerate(held)
        ]
