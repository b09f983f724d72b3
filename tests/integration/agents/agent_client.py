"""An agent of the tests: calls in the conversation of one session."""

import ssl
from collections.abc import Awaitable
from typing import Any

import httpx

from rollmesh.types import Batch, SegmentSource

from .agent_mesh import TOKEN, Api


def http_of(api: Api, verify: ssl.SSLContext | bool = True) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    return httpx.AsyncClient(base_url=f"{api.url}/v1", headers=headers, timeout=120, trust_env=False, verify=verify)


class Agent:
    """One session driven as an agent would."""

    def __init__(self, api: Api, session: dict[str, Any], **client: Any) -> None:
        self.id = session["id"]
        self.told = session
        self.messages = list(session["messages"])
        self.client = api.client(default_headers={"X-Rollmesh-Session": self.id}, **client)

    @classmethod
    async def open(cls, api: Api, http: httpx.AsyncClient, **client: Any) -> "Agent":
        answer = await http.post("/sessions", json={"wait_seconds": 90})
        assert answer.status_code == 201, answer.text
        return cls(api, answer.json(), **client)

    async def turn(self, heard: str = "and then?", **options: Any) -> Any:
        """One call; the answer and what was heard after it become part of the conversation."""
        answer = await self.client.chat.completions.create(
            model=self.told["model"], messages=self.messages, extra_body={"return_token_ids": True},
            **{"max_tokens": 20, **options},
        )  # fmt: skip
        self.messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        self.messages.append({"role": "user", "content": heard})
        return answer


async def state(http: httpx.AsyncClient, session_id: str) -> dict[str, Any]:
    return (await http.get(f"/sessions/{session_id}")).json()


async def above(count: Awaitable[int], least: int) -> bool:
    return await count > least


def sampled_tokens(batch: Batch) -> dict[str, list[int]]:
    """The tokens of the policy in every trajectory of a batch."""
    return {
        t.trajectory_id: [int(i) for s in t.segments if s.source is SegmentSource.POLICY for i in s.token_ids]
        for group in batch.groups
        for t in group.trajectories
    }
