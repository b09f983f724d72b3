"""One call of the API from request to answer: recorded or not, whole or streamed, counted."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from rollmesh.agents.agents_service import OpenAiService
from rollmesh.agents.answer_format import DONE, AnswerFormat, Choice, Endpoint, error_event
from rollmesh.agents.answer_stream import Delta, FinishedAnswer
from rollmesh.agents.openai_errors import OpenAiError
from rollmesh.agents.openai_http import CLIENT_CLOSED, EventStream, as_openai, unless_gone
from rollmesh.agents.parsed_request import ParsedRequest, check_recordable, read_ask
from rollmesh.agents.request_schema import ChatRequest, CompletionRequest
from rollmesh.agents.session_lookup import active_session

SESSION_HEADER = "X-Rollmesh-Session"
_RETRY_HEADER = "x-stainless-retry-count"
"""Sent by the official clients with every automatic retry."""


class Answering:
    """Serves chat and completions."""

    def __init__(self, service: OpenAiService) -> None:
        self._service = service

    async def answer(self, request: Request, body: ChatRequest | CompletionRequest, endpoint: Endpoint) -> Response:
        """The answer; errors are raised as OpenAiError and others, before a stream has begun."""
        session_id = request.headers.get(SESSION_HEADER, "")
        call = _Call(self._service, endpoint, recorded=bool(session_id))
        try:
            answers = await unless_gone(request, self._start(request, body, session_id), self._service.farewell)
        except BaseException as error:
            call.end(_outcome_of(error))
            raise
        shape = AnswerFormat(
            endpoint=endpoint,
            answer_id=f"{'chatcmpl' if endpoint == 'chat' else 'cmpl'}-{secrets.token_hex(12)}",
            created=int(time.time()),
            model=body.model,
            logprobs=body.wants_logprobs,
            token_ids=bool(body.return_token_ids),
            context_ids=[int(i) for i in answers[0].context_ids],
        )
        call.began(answers)
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            return await self._streamed(request, call, shape, session_id, usage=usage)
        try:
            whole = await unless_gone(request, call.whole(shape, session_id), self._service.farewell)
        except BaseException as error:
            await call.close(_outcome_of(error))
            raise
        await call.close("answered")
        return JSONResponse(whole, headers=_headers(session_id))

    async def _start(
        self, request: Request, body: ChatRequest | CompletionRequest, session_id: str
    ) -> Sequence[FinishedAnswer]:
        service = self._service
        if not session_id:
            return await service.free.start(await self._read(body))
        check_recordable(body, service.config)
        session = active_session(service, session_id)
        assert service.agents is not None
        retry = request.headers.get(_RETRY_HEADER, "0")
        ask = await self._read(body)
        answer = await service.agents.recorded.start(session, ask, is_retry=retry.isdecimal() and int(retry) > 0)
        return [answer]

    async def _read(self, body: ChatRequest | CompletionRequest) -> ParsedRequest:
        # In a thread, as all that grows with a context: a long one takes seconds, and the page and the worker's
        # heartbeat share this loop.
        return await asyncio.to_thread(read_ask, body, self._service.config, self._service.tokenizer)

    async def _streamed(
        self, request: Request, call: _Call, shape: AnswerFormat, session_id: str, *, usage: bool
    ) -> Response:
        events = call.events(shape, session_id, usage=usage)
        try:
            # The first piece before the status: what fails at once is answered as an error.
            first = await unless_gone(request, anext(events), self._service.farewell)
        except BaseException as error:
            await events.aclose()
            await call.close(_outcome_of(error))
            raise

        async def stream() -> AsyncGenerator[bytes, None]:
            try:
                yield first
                async for event in events:
                    yield event
                call.outcome = "answered"
            except Exception as error:
                call.outcome = _outcome_of(error)
                yield error_event(as_openai(error).body)

        async def end() -> None:
            await events.aclose()
            await call.close(call.outcome)

        return EventStream(stream(), end, headers=_headers(session_id))


class _Call:
    """One call under way and its counts."""

    def __init__(self, service: OpenAiService, endpoint: Endpoint, *, recorded: bool) -> None:
        self._metrics = service.metrics
        self._farewell = service.farewell
        self._endpoint = endpoint
        self._recorded = "yes" if recorded else "no"
        self._begun = time.monotonic()
        self._answers: Sequence[FinishedAnswer] = ()
        self._ended = False
        self._first_told = False
        self.outcome = "cancelled"
        """How a streamed call ended; as long as nothing else is known, its client has left."""
        self._metrics.running.inc()

    def began(self, answers: Sequence[FinishedAnswer]) -> None:
        self._answers = answers
        self._metrics.context_tokens.labels(recorded=self._recorded).inc(len(answers[0].context_ids))

    def end(self, outcome: str) -> None:
        if self._ended:
            return
        self._ended = True
        metrics = self._metrics
        metrics.running.dec()
        metrics.calls.labels(endpoint=self._endpoint, recorded=self._recorded, outcome=outcome).inc()
        metrics.call_seconds.observe(time.monotonic() - self._begun)
        tokens = sum(answer.turn.token_count for answer in self._answers)
        metrics.answer_tokens.labels(recorded=self._recorded).inc(tokens)

    async def close(self, outcome: str) -> None:
        """End every answer; those not complete are cancelled."""
        try:
            await asyncio.gather(*(answer.aclose() for answer in self._answers))
        finally:
            self.end(outcome)

    async def whole(self, shape: AnswerFormat, session_id: str) -> dict[str, Any]:
        choices = [Choice() for _ in self._answers]
        async with aclosing(self._merged()) as merged:
            async for index, delta in merged:
                choices[index].add(delta)
        return shape.whole(choices, self._extra(session_id))

    async def events(self, shape: AnswerFormat, session_id: str, *, usage: bool) -> AsyncGenerator[bytes, None]:
        choices = [Choice() for _ in self._answers]
        begun: set[int] = set()
        async with aclosing(self._merged()) as merged:
            async for index, delta in merged:
                if index not in begun:
                    begun.add(index)
                    if (first := shape.first(index)) is not None:
                        yield first
                offset = len(choices[index].text)
                choices[index].add(delta)
                yield shape.piece(index, delta, offset, self._extra(session_id) if delta.finish_reason else {})
        if usage:
            yield shape.usage_event(choices, self._extra(session_id))
        yield DONE

    async def _merged(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """News of all answers as they come."""
        queue: asyncio.Queue[tuple[int, Delta] | BaseException | None] = asyncio.Queue(maxsize=64)

        async def read(index: int, answer: FinishedAnswer) -> None:
            try:
                async for delta in answer.deltas:
                    await queue.put((index, delta))
                await queue.put(None)
            except Exception as error:
                await queue.put(error)

        async def end() -> None:
            await queue.put(await self._farewell.heard())

        readers = [asyncio.create_task(read(index, answer)) for index, answer in enumerate(self._answers)]
        readers.append(asyncio.create_task(end()))
        try:
            left = len(self._answers)
            while left:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    left -= 1
                    continue
                if item[1].text and not self._first_told:
                    self._tell_first()
                yield item
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    def _tell_first(self) -> None:
        self._first_told = True
        self._metrics.first_text_seconds.observe(time.monotonic() - self._begun)

    def _extra(self, session_id: str) -> dict[str, Any]:
        """What OpenAI's API has no field for."""
        versions = sorted({v for answer in self._answers for v in answer.turn.policy_versions})
        extra: dict[str, Any] = {"policy_versions": versions}
        if session_id:
            extra |= {"session": session_id, "trajectory": self._answers[0].trajectory_id}
        return extra


def _headers(session_id: str) -> dict[str, str]:
    return {SESSION_HEADER: session_id} if session_id else {}


def _outcome_of(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "cancelled"
    if isinstance(error, OpenAiError):
        if error.status == CLIENT_CLOSED:
            return "cancelled"
        return "refused" if error.status < 500 or error.status == 503 else "failed"
    return "failed"
