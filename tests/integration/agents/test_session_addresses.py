"""Ways to name the session of a call: API key, URL path, two headers, and a name that the first call brings."""

from collections.abc import Callable
from typing import Any

import openai
import pytest

from .agent_client import http_of, state
from .agent_mesh import AgentMesh, Api


async def ask(client: openai.AsyncOpenAI, told: dict[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
    """One call; the answer and a next question become part of the conversation."""
    answer = await client.chat.completions.create(model=told["model"], messages=messages, max_tokens=8)
    content = answer.choices[0].message.content
    messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "and?"}]
    return dict(answer.model_extra["rollmesh"])


async def test_one_conversation_continues_whichever_way_its_calls_name_the_session(
    make_mesh: Callable[..., Any],
) -> None:
    mesh: AgentMesh = await make_mesh()
    async with mesh.api() as api, http_of(api) as http:
        told = (await http.post("/sessions")).json()
        messages = list(told["messages"])
        ways: list[dict[str, Any]] = [
            {"api_key": told["api_key"]},
            {"base_url": f"{api.url}/sessions/{told['id']}/v1"},
            {"base_url": f"{api.url}/sessions/{told['id']}/v1/", "api_key": told["api_key"]},
            {"default_headers": {"X-Rollmesh-Session": told["id"]}},
            {"default_headers": {"X-Session-ID": told["id"]}},
        ]
        trajectories = set()
        for way in ways:
            async with api.client(**way) as client:
                extra = await ask(client, told, messages)
                assert extra["session"] == told["id"]
                trajectories.add(extra["trajectory"])
        assert len(trajectories) == 1
        shown = await state(http, told["id"])
        assert shown["drift_count"] == 0 and shown["trajectories"][0]["id"] in trajectories
        assert [each["id"] for each in (await http.get("/sessions")).json()["data"]] == [told["id"]]


async def test_the_key_of_a_session_opens_that_session_alone(make_mesh: Callable[..., Any]) -> None:
    mesh: AgentMesh = await make_mesh()
    async with mesh.api() as api, http_of(api) as http:
        mine, other = [(await http.post("/sessions")).json() for _ in range(2)]
        key = {"Authorization": f"Bearer {mine['api_key']}"}
        assert (await http.get("/models", headers=key)).status_code == 200
        # An agent can read its key: it neither rewards itself with it nor reads the answer of its task.
        for method, path in (
            ("GET", f"/sessions/{mine['id']}"),
            ("POST", f"/sessions/{mine['id']}/reward"),
            ("DELETE", f"/sessions/{other['id']}"),
            ("POST", "/sessions"),
            ("GET", "/sessions"),
        ):
            refused = await http.request(method, path, headers=key, json={"reward": 1.0} if method == "POST" else None)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key"), path
        unknown = {"Authorization": f"Bearer sk-ses-{'0' * 32}"}
        assert (await http.get("/models", headers=unknown)).status_code == 404
        body = {"model": mine["model"], "messages": mine["messages"]}
        two = await http.post("/chat/completions", json=body, headers={**key, "X-Rollmesh-Session": other["id"]})
        assert (two.status_code, two.json()["error"]["code"]) == (400, "two_sessions")
        # A client that names its episodes in any case is in the session that its key or its URL names.
        both = await http.post("/chat/completions", json=body, headers={**key, "X-Session-ID": "trace 7"})
        assert both.json()["rollmesh"]["session"] == mine["id"]
        odd = await http.post("/chat/completions", json=body, headers=[(b"X-Session-ID", "\u00e9".encode())])
        assert (odd.status_code, "printable ASCII" in odd.text) == (400, True)
        named = await http.post("/chat/completions", json=body, headers={"X-Session-ID": "mine"})
        assert (named.status_code, named.json()["error"]["code"]) == (404, "session_not_found"), "no call opens one"


async def test_the_first_call_opens_a_session_under_the_name_that_the_agent_gives(
    make_mesh: Callable[..., Any],
) -> None:
    mesh: AgentMesh = await make_mesh(rollout={"agent": {"contexts": "free", "open_on_first_call": True}})
    name = "0c6e/trace of an environment"
    model, messages = mesh.config.name, [{"role": "user", "content": "what is 2 + 3?"}]
    told = {"model": model}
    async with mesh.api() as api, http_of(api) as http:
        body = {"model": model, "prompt": "what is 2 + 3?"}
        error = (await http.post("/completions", json=body, headers={"X-Session-ID": name})).json()["error"]
        assert error["code"] == "prompt_mismatch" and "first token of its prompt" in error["message"]
        assert "contexts" not in error["message"], "the agent writes the whole context already"
        async with api.client(default_headers={"X-Session-ID": name}) as client:
            first = await ask(client, told, messages)
            again = await ask(client, told, messages)
        assert again == first and first["session"].startswith("ses-")
    # The name lives as long as the session: another process takes both over.
    async with mesh.api(index=1) as api, http_of(api) as http, api.client(max_retries=30) as client:
        (session,) = (await http.get("/sessions")).json()["data"] or [await taken_over(mesh, api, first["session"])]
        assert (session["id"], session["name"]) == (first["session"], name)
        async with api.client(default_headers={"X-Session-ID": name}) as named:
            assert await ask(named, told, messages) == first
        path = f"/sessions/{first['session']}"
        assert (await http.post(f"{path}/reward", json={"reward": 1.0})).status_code == 200
        async with api.client(default_headers={"X-Session-ID": name}) as named:
            with pytest.raises(openai.APIStatusError) as ended:
                await ask(named, told, messages)
            assert ended.value.code == "session_ended"


async def taken_over(mesh: AgentMesh, api: Api, session_id: str) -> dict[str, Any]:
    """Wait until the service has taken a session over; return its JSON."""
    async with http_of(api) as http:

        async def known() -> bool:
            return (await http.get(f"/sessions/{session_id}")).status_code == 200

        await mesh.until("the session is taken over", known)
        return await state(http, session_id)
