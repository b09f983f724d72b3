"""Worker sessions, and the return of their work after a crash of the worker or of the server."""

import secrets
from collections.abc import Sequence

from rollmesh.store.limits import QueuePart
from rollmesh.store.queue_types import AgentPlace, HeldTokens, ReRegistered
from rollmesh.store.redis_connection import Argument

_SLICE = 128


class Sessions(QueuePart):
    """Sessions of rollout workers."""

    async def open(self, worker: str, address: str = "") -> str:
        """Open a session; returns a random 128-bit token that every write of the worker passes.

        ``address``: host:port of a process that has sessions of agents.
        """
        token = secrets.token_hex(16)
        await self._connection.run("open_session", token, worker, address)
        return token

    async def agent_addresses(self) -> set[str]:
        """Return the addresses of the live processes that have sessions of agents."""
        return {address.decode() for address in await self._connection.run("agent_addresses")}

    async def find_agent(self, id_or_name: str) -> AgentPlace | None:
        """Return the process that has a session of an agent, or had it last; None for an unknown session."""
        reply = await self._connection.run("find_agent", id_or_name)
        return AgentPlace(address=reply[0].decode(), lives=bool(reply[1])) if reply else None

    async def place_agent(self, session: str, agent: str) -> None:
        """Name this worker's process as the one that has an agent's session without a lease, of an evaluation."""
        await self._connection.run("place_agent", session, agent)

    async def heartbeat(self, session: str, waiting: int = 0) -> str:
        """Renew a session; raises SessionLost when it is closed or was reaped.

        ``waiting``: number of its leased trajectories that wait between two calls of a generator.
        Returns the run_id of the server. If it differs from that of the last heartbeat, Redis has restarted, possibly
        with an earlier state: call ``reregister`` with everything that the session holds.
        """
        reply: bytes = await self._connection.run("heartbeat", session, waiting)
        return reply.decode()

    async def count_alive(self, now: float) -> int:
        """Return the number of open sessions that have not expired at ``now``, Unix seconds by the server's clock."""
        sessions = self._connection.keys.single("sessions")
        return int(await self._connection.command("ZCOUNT", sessions, int(1000 * now), "+inf"))

    async def held_by(self, session: str) -> set[str]:
        """Return the ids of the trajectories that a session holds."""
        members = await self._connection.command("SMEMBERS", self._connection.keys.of("held", session))
        return {member.decode() for member in members}

    async def close(self, session: str) -> None:
        """Close a session; its trajectories return to the queue immediately and do not count as attempts."""
        await self.give_back(session, counts_as_attempt=False)

    async def give_back(self, session: str, *, counts_as_attempt: bool) -> int:
        """Return the trajectories of a closed or dead session to the queue, in slices; returns their number."""
        total = 0
        while True:
            given = int(await self._connection.run("close_session", session, _SLICE, int(not counts_as_attempt)))
            total += given
            if not given:
                return total

    async def reregister(
        self, session: str, held: Sequence[HeldTokens], worker: str = "", address: str = ""
    ) -> list[ReRegistered]:
        """Report everything that the session holds, after Redis came back or the session was replaced.

        Trajectories that are not in ``held`` return to the queue. A trajectory is kept only if the tokens in the queue
        are the first tokens of the worker's, of the same incarnation. A session that Redis has lost is opened again
        while the recovery lasts; afterwards the call raises SessionLost. The caller then sends the tokens after
        ``saved_token_count`` of the kept trajectories again, and drops the others: they are regenerated.
        """
        keys = self._connection.keys
        saved = await self._connection.commands(
            [("HGET", keys.of("trajectory", h.trajectory_id), "tokens") for h in held], "reregister"
        )
        words: list[Argument] = []
        for each, raw in zip(held, saved, strict=True):
            tokens = int(raw or 0)
            # The worker has no digest of tokens that it does not have. token_count() is called after the read, because
            # a save may have been in progress.
            digest = str(each.digest_at(tokens)) if tokens <= each.token_count() else "-"
            words += [each.trajectory_id, each.incarnation, tokens, digest]
        reply = await self._connection.run("reregister", session, worker, address, *words)
        return [
            ReRegistered(trajectory_id=h.trajectory_id, kept=bool(reply[2 * at]), saved_token_count=reply[2 * at + 1])
            for at, h in enumerate(held)
        ]


class Recovery(QueuePart):
    """Restarts of the server and the recovery that follows each unclean one."""

    async def server_run_id(self) -> str:
        """Return the current run_id of the server."""
        info = await self._connection.command("INFO", "server")
        return str(info["run_id"])

    async def begin(self) -> bool:
        """Open a recovery when the server is a new one; returns True while a recovery is in progress.

        Every fenced script does the same; this call does it immediately.
        """
        recovering, _ = await self._connection.run("begin_recovery")
        return bool(recovering)

    async def waits_for_trainer(self) -> bool:
        """Do as ``begin``; returns True if the recovery in progress ends only after a trainer has re-asserted its step.

        The session of a killed trainer stays open until the next one opens, so nothing is reaped before.
        """
        if not await self.begin():
            return False
        meta = self._connection.keys.single("meta")
        trainer, reasserted = await self._connection.command("HMGET", meta, "trainer", "reasserted")
        return trainer is not None and reasserted != b"1"

    async def mark_clean_shutdown(self) -> None:
        """Announce a clean stop of the server, after all clients have stopped; its next start needs no recovery."""
        await self._connection.run("mark_clean")
