"""Environment of an OpenEnv server (0.10): an episode is a session, a turn is a step or the call of a tool."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rollmesh.tasks.environments.environment_protocol import EnvironmentFailed, EnvironmentReply
from rollmesh.tasks.environments.openenv_session import OpenEnvFailed, OpenEnvSession
from rollmesh.tasks.environments.turn_shape import (
    EpisodeTurns,
    TurnShape,
    UnreadableAction,
    as_text,
    check_choice,
    fields_of,
    json_action,
    seed_of,
)
from rollmesh.types import Prompt


class OpenEnvEnvironment:
    """Episode of an OpenEnv server, in a session of its own; it cannot be replayed, so a lost worker restarts it."""

    replayable = False

    def __init__(
        self,
        url: str,
        action: Literal["text", "json", "tool", "mcp"] = "text",
        field: str = "message",
        observation: str = "",
        reset_fields: Sequence[str] = (),
        reward: Literal["sum", "last", "verifier"] = "sum",
        tag: str = "",
        first: str = "{tools}{text}",
        reply: str = "{text}",
        ends_unread: bool = False,
        capacity_seconds: float = 30.0,
    ) -> None:
        """Create an episode.

        ``url`` is the server's address. ``action`` is what a turn says: ``text`` for ``{field: text}``, ``json`` for an
        action as JSON, ``tool`` for a call of a tool by a step, with a reward, and ``mcp`` for a call by MCP, whose
        answer has none; a turn without a call ends an episode of tools, and is the step ``{field: text}`` of one of
        MCP. Calls are ``{"name", "arguments"}`` in the tag ``tool_call``. ``observation`` names the field of the
        observation that the policy reads (dots for inner fields; else text, content, message or messages, else JSON).
        ``reset_fields`` of the row are arguments of the reset, beside ``seed``. ``reward`` is the sum of the steps, the
        last, or the verifier's. ``tag`` names the tag around an action. ``first`` and ``reply`` are the texts around
        {text} and {tools}. ``ends_unread`` ends an episode at an action that cannot be read, which is answered with
        the reason otherwise. ``capacity_seconds`` bounds the wait for a free session, below
        rollout.environment_timeout_seconds.
        Raises ConfigError for options that do not fit.
        """
        check_choice("action", action, ("text", "json", "tool", "mcp"))
        self._has_tools = action in ("tool", "mcp")
        self._action, self._field = action, field
        self._reset_fields, self._capacity_seconds = reset_fields, capacity_seconds
        self._shape = TurnShape(
            first=first,
            reply=reply,
            observation=observation,
            tag=tag or ("tool_call" if self._has_tools else ""),
            reward=reward,
            ends_unread=ends_unread,
        )
        self._turns = EpisodeTurns(self._shape)
        self._session = OpenEnvSession(url)

    async def reset(self, prompt: Prompt) -> EnvironmentReply:
        data = {"seed": seed_of(prompt), **fields_of(prompt, self._reset_fields)}
        begun = await self._session.begin(data, self._capacity_seconds)
        tools = await self._tools() if self._has_tools else ""
        return self._turns.first(self._shape.observation_text(begun["observation"]), begun["done"], tools)

    async def step(self, response_text: str, idempotency_key: str) -> EnvironmentReply:
        try:
            if not self._has_tools:
                return await self._step(self._plain_action(response_text))
            if f"<{self._shape.tag}>" in response_text:
                return await self._call(self._shape.action_text(response_text))
        except UnreadableAction as error:
            return self._turns.unread(error)
        if self._action == "mcp":
            return await self._step({self._field: response_text.strip()})
        return self._turns.reply("", None, done=True)

    async def aclose(self) -> None:
        await self._session.aclose()

    def _plain_action(self, turn: str) -> Mapping[str, Any]:
        text = self._shape.action_text(turn)
        return json_action(text) if self._action == "json" else {self._field: text}

    async def _step(self, action: Mapping[str, Any]) -> EnvironmentReply:
        try:
            seen = await self._session.ask("step", action, "observation")
        except OpenEnvFailed as error:
            # The session goes on after both, and the policy can learn what the environment does not take; but the
            # fields of an action may be those of the options.
            if error.code == "EXECUTION_ERROR" or (
                error.code == "VALIDATION_ERROR" and self._action in ("json", "tool")
            ):
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
        result = answer.get("result")
        tools = result.get("tools") if isinstance(result, dict) else None
        if not isinstance(tools, list):
            raise EnvironmentFailed(f"environment: the server lists no tools: {answer.get('error')}")
        return "".join(f"{json.dumps({'type': 'function', 'function': _function(tool)})}\n" for tool in tools)


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    schema = tool.get("inputSchema", tool.get("input_schema"))
    return {"name": tool.get("name"), "description": tool.get("description"), "parameters": schema}


def _result_text(answer: Mapping[str, Any]) -> str:
    """Return what a tool says: the texts of its result, or its error."""
    if (error := answer.get("error")) is not None:
        return f"error: {error.get('message') if isinstance(error, dict) else error}"
    result = answer.get("result")
    blocks = result.get("content") if isinstance(result, dict) else None
    if not isinstance(blocks, list):
        return as_text(result)
    return "\n".join(as_text(block.get("text", block) if isinstance(block, dict) else block) for block in blocks)
