"""An agent of the agents SDK, as its users write one; runs in the environment of frameworks, where the SDK is.

Usage: sdk_agent.py BASE_URL MODEL FUNCTION KEY KEY; prints the final outputs of a whole run and of a streamed one.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from agents import Agent, FunctionTool, OpenAIResponsesModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI


async def add(_: Any, arguments: str) -> str:
    sent = json.loads(arguments)
    return "5" if sent == {"a": 2, "b": 3} else "five"


async def main(url: str, model: str, function: str, *keys: str) -> None:
    set_tracing_disabled(True)
    of = json.loads(function)
    tool = FunctionTool(of["name"], of["description"], of["parameters"], add, strict_json_schema=False)
    clients = [AsyncOpenAI(base_url=url, api_key=key, max_retries=0) for key in keys]
    whole, streamed = (
        Agent(name="calculator", tools=[tool], model=OpenAIResponsesModel(model, client)) for client in clients
    )
    question = "what is 2 + 3?"
    outputs = [(await Runner.run(whole, question)).final_output]
    result = Runner.run_streamed(streamed, question)
    kinds = {event.type async for event in result.stream_events()}
    assert {"raw_response_event", "run_item_stream_event"} <= kinds
    outputs.append(result.final_output)
    print(json.dumps(outputs))


asyncio.run(main(*sys.argv[1:]))
