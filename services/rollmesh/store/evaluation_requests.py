"""Queue of evaluation requests, separate from admission and pool, and their results by policy version."""

import json
from dataclasses import asdict

from rollmesh.config.rollout import EvalConfig
from rollmesh.store.limits import QueuePart
from rollmesh.store.queue_types import EvalRecord, EvalRequest, EvalResult


def evaluation_request(config: EvalConfig, policy_version: int) -> EvalRequest:
    """Return the run's fixed evaluation of one policy version; repeated calls return the same request."""
    return EvalRequest(
        evaluation_id=f"version-{policy_version}",
        policy_version=policy_version,
        prompt_count=config.prompt_count,
        samples_per_prompt=config.samples_per_prompt,
    )


def due_versions(every_versions: int, after: int, newest: int) -> range:
    """Return the multiples of ``every_versions`` above ``after``, up to ``newest``; none when it is 0."""
    if every_versions == 0:
        return range(0)
    return range((max(after, 0) // every_versions + 1) * every_versions, newest + 1, every_versions)


def evaluation_floor(every_versions: int, newest: int, keep_last: int) -> int:
    """Return the version after which a client requests evaluations when it does not know the earlier requests.

    At most one evaluation back, and never a version that ``checkpoints.keep_last`` may have deleted already: no
    generator could serve it, and a client would wait for its score without end.
    """
    return max(0, newest - min(every_versions, keep_last))


def due_at_end(config: EvalConfig, newest: int, keep_last: int) -> range:
    """Return the versions, up to the newest, whose evaluations by interval may be missing when the run ends."""
    every = config.every_versions
    return due_versions(every, evaluation_floor(every, newest, keep_last), newest)


class Evaluations(QueuePart):
    """Requests, claims and results of evaluations."""

    async def request(self, request: EvalRequest) -> None:
        """Queue an evaluation; the same request again is a no-op, another request with the same id a Conflict."""
        body = json.dumps(asdict(request), sort_keys=True)
        await self._connection.run("request_evaluation", request.evaluation_id, body)

    async def claim(self, session: str) -> EvalRequest | None:
        """Claim the oldest waiting request, None without one; the request waits again when the session dies."""
        evaluation_id = (await self._connection.run("claim_evaluation", session)).decode()
        if not evaluation_id:
            return None
        body = await self._connection.command("HGET", self._keys.of("evaluation", evaluation_id), "request")
        return EvalRequest(**json.loads(body))

    async def finish(self, session: str, evaluation_id: str, result: EvalResult) -> None:
        """Record the result; raises SessionLost when another session holds the evaluation."""
        body = json.dumps(asdict(result), sort_keys=True)
        await self._connection.run("finish_evaluation", session, evaluation_id, body)

    async def all(self) -> list[EvalRecord]:
        """Return every evaluation, finished or not, in the order of the requests."""
        ids = [i.decode() for i in await self._connection.command("ZRANGE", self._keys.single("evaluations"), 0, -1)]
        commands = [("HGETALL", self._keys.of("evaluation", i)) for i in ids]
        records = await self._connection.commands(commands)
        claims = await self._connection.command("HGETALL", self._keys.single("evaluation_claims"))
        return [
            EvalRecord(
                request=EvalRequest(**json.loads(record[b"request"])),
                claimed=i.encode() in claims,
                result=EvalResult(**json.loads(record[b"result"])) if b"result" in record else None,
                request_time_seconds=int(record[b"time"]) / 1000,
                finish_time_seconds=int(record[b"finish_time"]) / 1000 if b"finish_time" in record else None,
            )
            for i, record in zip(ids, records, strict=True)
        ]
