"""Answers to HEAD: those to GET, without the body. Probes, proxies and browsers ask so for any address."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadRequests:
    """Application that answers HEAD for another one, which only knows GET."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection; an endless body, as of an event stream, ends after its head."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        answered = False

        async def receive_until_answered() -> Message:
            return {"type": "http.disconnect"} if answered else await receive()

        async def send_head(message: Message) -> None:
            nonlocal answered
            if not answered and message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b""})
                answered = True

        await self._app({**scope, "method": "GET"}, receive_until_answered, send_head)
