"""Environment of an OpenEnv server (0.10): an episode is a session, a turn is a step or the call of a tool."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from rollmesh.tasks.environments.environment_protocol import EnvironmentFailed, EnvironmentReply
from rollmesh.tasks.environments.openenv_session import OpenEnvFailed, OpenEnvSession
from rollmesh.tasks.environments.turn_shape import (
    EpisodeTurns,
    TurnShape,
    UnreadableAction,
    as_text,
    check_choice,
    json_action,
    with_shape,
)
from rollmesh.types import Prompt


@with_shape
class OpenEnvEnvironment:
    """Episode of an OpenEnv server, in a session of its own; it cannot be replayed, so a lost worker restarts it."""

    replayable = False

    def __init__(
        self,
        url: str,
        action: Literal["text", "json", "tool", "mcp"] = "text",
        field: str = "message",
        first: str = "{tools}{text}",
        tag: str = "",
        capacity_seconds: float = 30.0,
        **shape: Any,
    ) -> None:
        """Create an episode.

        ``url`` is the server's address. ``action`` is what a turn says: ``text`` for ``{field: text}``, ``json`` for an
        action as JSON, ``tool`` for a call of a tool by a step, with a reward, and ``mcp`` for a call by MCP, whose
        answer has none; a turn without a call ends an episode of tools, and is the step ``{field: text}`` of one of
        MCP. Calls are ``{"name", "arguments"}``, by default in the tag ``tool_call``. ``capacity_seconds`` bounds the
        wait for a free session, below rollout.environment_timeout_seconds. Raises ConfigError for wrong options.
        """
        check_choice("action", action, ("text", "json", "tool", "mcp"))
        self._has_tools = action in ("tool", "mcp")
        self._action, self._field, self._capacity_seconds = action, field, capacity_seconds
        self._shape = TurnShape(first=first, tag=tag or ("tool_call" if self._has_tools else ""), **shape)
        self._turns = EpisodeTurns(self._shape)
        self._session = OpenEnvSession(url)

    async def reset(self, prompt: Prompt) -> EnvironmentReply:
        seed, options = self._shape.reset_of(prompt)
        begun = await self._session.begin({"seed": seed, **options}, self._capacity_seconds)
        tools = await self._tools() if self._has_tools else ""
        return self._turns.first(self._shape.observation_text(begun["observation"]), begun["done"], tools)

    async def step(self, response_text: str, idempotency_key: str) -> EnvironmentReply:
        try:
            if not self._has_tools:
                text = self._shape.action_text(response_text)
                return await self._step(json_action(text) if self._action == "json" else {self._field: text})
            if f"<{self._shape.tag}>" in response_text:
                return await self._call(self._shape.action_text(response_text))
        except UnreadableAction as error:
            return self._turns.unread(error)
        if self._action == "mcp":
            return await self._step({self._field: response_text.strip()})
        return self._turns.reply("", None, done=True)

    async def aclose(self) -> None:
        await self._session.aclose()

    async def _step(self, action: Mapping[str, Any]) -> EnvironmentReply:
        try:
            seen = await self._session.ask("step", action, "observation")
        except OpenEnvFailed as error:
            # The session goes on after both, and the policy can learn what the environment does not take; but the
            # fields of an action may be those of the options.
            own_fields = self._action in ("text", "mcp")
            if error.code == "EXECUTION_ERROR" or (error.code == "VALIDATION_ERROR" and not own_fields):
                raise UnreadableAction(error.said) from error
            raise
        observation = seen["observation"]
        is_result = self._has_tools and "tool_name" in observation
        text = _result_text(observation) if is_result else self._shape.observation_text(observation)
        return self._turns.reply(text, seen.get("reward"), seen["done"])

    async def _call(self, text: str) -> EnvironmentReply:
        call = json_action(text)
        name, arguments = call.get("name"), call.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise UnreadableAction("a call is a JSON object with a name, and an object of arguments")
        if self._action == "tool":
            return await self._step({"type": "call_tool", "tool_name": name, "arguments": arguments})
        answer = await self._session.call("tools/call", {"name": name, "arguments": arguments})
        return self._turns.reply(_result_text(answer), None, done=False)

    async def _tools(self) -> str:
        """Return the tools, one line of JSON each, as models are told of them. Raises EnvironmentFailed without any."""
        answer = await self._session.call("tools/list", {})
        if (tools := _listed(answer, "tools")) is None:
            raise EnvironmentFailed(f"environment: the server lists no tools: {answer.get('error')}")
        return "".join(f"{json.dumps({'type': 'function', 'function': _function(tool)})}\n" for tool in tools)


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    schema = tool.get("inputSchema", tool.get("input_schema"))
    return {"name": tool.get("name"), "description": tool.get("description"), "parameters": schema}


def _listed(answer: Mapping[str, Any], name: str) -> list[Any] | None:
    """Return a list of the result of an MCP call; None without one."""
    result = answer.get("result")
    found = result.get(name) if isinstance(result, dict) else None
    return found if isinstance(found, list) else None


def _result_text(answer: Mapping[str, Any]) -> str:
    """Return what a tool says: the texts of its result, or its error."""
    if (error := answer.get("error")) is not None:
        return f"error: {error.get('message') if isinstance(error, dict) else error}"
    if (blocks := _listed(answer, "content")) is None:
        return as_text(answer.get("result"))
    return "\n".join(as_text(block.get("text", block) if isinstance(block, dict) else block) for block in blocks)
