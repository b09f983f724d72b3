"""A judge over HTTP that tests control."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

Reply = tuple[int, dict[str, str], bytes]


@dataclass
class JudgeServer:
    """A small HTTP/1.1 server: every request is kept, every reply is what ``answer`` says."""

    url: str = ""
    answer: Callable[[int, dict[str, Any]], Reply | float] = lambda number, body: (200, {}, b'{"score": 1}')
    """Reply to request ``number`` with ``body``, or seconds in which the caller should hang up."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    answers_together: int = 1
    """The first answer waits until so many requests are there."""
    most_at_once: int = 0
    _at_once: int = 0
    _together: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().split("\r\n")[1:-2]
                headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
                body = json.loads(await reader.readexactly(int(headers["content-length"])))
                self.requests.append(body)
                self.headers.append(headers)
                self._at_once += 1
                self.most_at_once = max(self.most_at_once, self._at_once)
                if self._at_once >= self.answers_together:
                    self._together.set()
                await self._together.wait()
                reply = self.answer(len(self.requests), body)
                if isinstance(reply, float):
                    with suppress(TimeoutError):  # ends early when the caller hangs up
                        await asyncio.wait_for(reader.read(1), reply)
                    reply = (200, {}, b'{"score": 1}')
                self._at_once -= 1
                status, extra, content = reply
                lines = [f"HTTP/1.1 {status} X", f"content-length: {len(content)}"]
                lines += [f"{k}: {v}" for k, v in extra.items()]
                writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + content)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def judge_server() -> AsyncIterator[JudgeServer]:
    """Serve a judge until the block ends."""
    judge = JudgeServer()
    server = await asyncio.start_server(judge.serve, "127.0.0.1", 0)
    judge.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/score"
    async with server:
        yield judge
