"""Environment that a user of verifiers could have written: sums of two numbers, with a tool. Imported there only."""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.runtimes import ProgramResult, SubprocessRuntime

__all__ = ["OwnLoop", "Sums"]


class SumData(vf.TaskData):
    answer: int
    tools: tuple[dict[str, Any], ...] = ()
    gate: str = ""
    """File without which the tools do not answer."""


def added(a: int, b: int) -> str:
    return str(a + b) if a < b else "five"


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(str(self.data.answer) in (trace.last_reply or ""))

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class Sums(vf.Taskset[SumTask]):
    def load(self) -> Iterator[SumTask]:
        for answer in (5, 6):
            yield SumTask(SumData(prompt="what is 2 + 3?", answer=answer), self.config.task)


class OwnLoopConfig(vf.HarnessConfig):
    pass


class OwnLoop(vf.Harness[OwnLoopConfig]):
    """Agent in the process of the server."""

    NEEDS_CONTAINER = False

    def use(self, arguments: str) -> str:
        return added(**json.loads(arguments))

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> ProgramResult:
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            while True:
                answer = await client.chat.completions.create(
                    model=ctx.model, messages=messages, tools=data.tools, temperature=0.5
                )
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                for call in message.tool_calls or []:
                    while data.gate and not os.path.exists(data.gate):  # noqa: ASYNC240
                        await asyncio.sleep(0.05)
                    content = self.use(call.function.arguments)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
                if not message.tool_calls:
                    return ProgramResult(exit_code=0, stdout="", stderr="")


async def same_python(self: SubprocessRuntime, script: Any, env: Any = None, *, activate: bool = True) -> list[str]:
    await self.write("program.py", script.encode() if isinstance(script, str) else script)
    return [sys.executable, str(self.workdir / "program.py")]


# The programs of the package run with this Python, which has what they need, instead of one that uv downloads.
SubprocessRuntime.prepare_uv_script = same_python  # type: ignore[method-assign]
