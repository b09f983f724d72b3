"""Chat and completion calls, from request to answer: recorded or not, whole or streamed."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from rollmesh.agents.agent_session import AgentSession
from rollmesh.agents.agents_service import OpenAiService
from rollmesh.agents.answer_stream import AnswerInProgress, Delta
from rollmesh.agents.connections import CLIENT_CLOSED, EventStream, is_answered_here, unless_disconnected
from rollmesh.agents.openai_answers import AnswerFormat, Choice, Endpoint
from rollmesh.agents.openai_errors import OpenAiError, as_openai
from rollmesh.agents.openai_requests import ChatRequest, CompletionRequest
from rollmesh.agents.parsed_request import ParsedRequest, check_recordable, parse_request
from rollmesh.agents.session_address import SESSION_HEADER, named_session, session_of_call
from rollmesh.runtime.tasks import MOST_CHARACTERS, aside, cancel_and_wait

_ID_PREFIXES: Mapping[Endpoint, str] = {
    "chat": "chatcmpl-",
    "completions": "cmpl-",
    "generate": "gen-",
    "responses": "resp_",
}
_RETRY_HEADER = "x-stainless-retry-count"
"""Header that the official clients send with every automatic retry."""


class Answering:
    """Handler of chat and completion calls."""

    def __init__(self, service: OpenAiService) -> None:
        self._service = service

    async def answer(
        self,
        request: Request,
        body: ChatRequest | CompletionRequest,
        endpoint: Endpoint,
        answer_format: Callable[..., AnswerFormat] = AnswerFormat,
    ) -> Response:
        """Return the whole or streamed answer to a call; ``answer_format`` makes the format of its endpoint.

        Raises OpenAiError and other errors until the stream begins. Later errors become an event of the stream.
        """
        named = self._named(request)
        if named and self._service.agents is not None:  # before the work of reading the body
            await self._service.check_place(named, here=is_answered_here(request))
        call = _Call(self._service, endpoint, recorded=bool(named))
        try:
            return await unless_disconnected(
                request, self._begun(request, body, named, call, answer_format), self._service.drain
            )
        except BaseException as error:
            await call.close(_outcome_of(error))
            raise

    async def _begun(
        self,
        request: Request,
        body: ChatRequest | CompletionRequest,
        named: str,
        call: "_Call",
        answer_format: Callable[..., AnswerFormat],
    ) -> Response:
        """Return the whole answer, or a stream whose first piece is there: an early failure still has a status."""
        session, parsed, answers = await self._start(request, body, named)
        options, endpoint = body.stream_options, call.endpoint
        shape = answer_format(
            endpoint=endpoint,
            answer_id=f"{_ID_PREFIXES[endpoint]}{secrets.token_hex(12)}",
            created=int(time.time()),
            model=body.model,
            logprobs=body.wants_logprobs,
            token_ids=bool(body.return_token_ids) or endpoint == "generate",
            contexts=[answer.context_ids for answer in answers[:: body.n or 1]],
            choices_per_context=body.n or 1,
            read=None if parsed.read is None else partial(parsed.read, answers[0].context_ids),
            streams=parsed.streams,
            sends_usage=options is not None and options.include_usage,
        )
        session_id = "" if session is None else session.session_id
        call.began(answers, shape)
        headers = {SESSION_HEADER: session_id} if session_id else {}
        if body.stream:
            return await _streamed(call, shape, session_id, headers)
        whole = await call.whole(shape, session_id)
        await call.close("answered")
        return JSONResponse(whole, headers=headers)

    async def _start(
        self, request: Request, body: ChatRequest | CompletionRequest, named: str
    ) -> tuple[AgentSession | None, ParsedRequest, Sequence[AnswerInProgress]]:
        service = self._service
        if not named:
            requests = [await self._read(request, body, index) for index in range(body.prompt_count)]
            await service.check_published(requests[0].pinned_version)
            return None, requests[0], [answer for each in requests for answer in await service.unrecorded.start(each)]
        check_recordable(body, service.config)
        parsed = await self._read(request, body)
        session = await session_of_call(service, named, here=is_answered_here(request))
        retry = request.headers.get(_RETRY_HEADER, "0")
        answer = await service.agent_parts.recorded.start(
            session, parsed, is_retry=retry.isdecimal() and int(retry) > 0
        )
        return session, parsed, [answer]

    def _named(self, request: Request) -> str:
        """Return the id or the name of the call's session; an environment's own names mean nothing in other runs."""
        return named_session(request, with_client_header=self._service.agents is not None)

    async def _read(self, request: Request, body: ChatRequest | CompletionRequest, index: int = 0) -> ParsedRequest:
        # A long context takes seconds, and the page and the worker's heartbeat share this event loop.
        read = partial(parse_request, body, self._service.config, self._service.formats, index)
        return await aside(read, int(request.headers.get("content-length", MOST_CHARACTERS)))


async def _streamed(call: "_Call", shape: AnswerFormat, session_id: str, headers: Mapping[str, str]) -> Response:
    events = call.events(shape, session_id)
    first = await anext(events)

    async def stream() -> AsyncGenerator[bytes, None]:
        try:
            yield first
            async for event in events:
                yield event
            call.outcome = "answered"
        except Exception as error:
            call.outcome = _outcome_of(error)
            yield shape.failed(as_openai(error))

    async def end() -> None:
        await events.aclose()
        await call.close(call.outcome)

    return EventStream(stream(), end, headers=headers)


class _Call:
    """One call in progress and its metrics."""

    def __init__(self, service: OpenAiService, endpoint: Endpoint, *, recorded: bool) -> None:
        self._metrics = service.metrics
        self._drain = service.drain
        self.endpoint = endpoint
        self._recorded = "yes" if recorded else "no"
        self._begun = time.monotonic()
        self._answers: Sequence[AnswerInProgress] = ()
        self._first_answers: Sequence[AnswerInProgress] = ()
        """The first answer to each context."""
        self._ended = False
        self._first_text_seen = False
        self.outcome = "cancelled"
        """Outcome of a streamed call; "cancelled" until the stream ends, because a disconnected client sets nothing."""
        self._metrics.running.inc()

    def began(self, answers: Sequence[AnswerInProgress], shape: AnswerFormat) -> None:
        self._answers = answers
        self._first_answers = answers[:: shape.choices_per_context]
        self._metrics.context_tokens.labels(recorded=self._recorded).inc(sum(map(len, shape.contexts)))

    def end(self, outcome: str) -> None:
        if self._ended:
            return
        self._ended = True
        metrics = self._metrics
        metrics.running.dec()
        metrics.calls.labels(endpoint=self.endpoint, recorded=self._recorded, outcome=outcome).inc()
        metrics.call_seconds.observe(time.monotonic() - self._begun)
        if outcome == "answered":
            metrics.last_answer.set_to_current_time()
        tokens = sum(answer.turn.token_count for answer in self._answers)
        metrics.answer_tokens.labels(recorded=self._recorded).inc(tokens)
        cached = sum(answer.turn.cached_token_count for answer in self._first_answers)
        metrics.cached_tokens.labels(recorded=self._recorded).inc(cached)

    async def close(self, outcome: str) -> None:
        """Close every answer; cancel the incomplete ones."""
        try:
            await asyncio.gather(*(answer.aclose() for answer in self._answers))
        finally:
            self.end(outcome)

    async def whole(self, shape: AnswerFormat, session_id: str) -> dict[str, Any]:
        choices = [Choice() for _ in self._answers]
        async with aclosing(self._merged() if len(choices) > 1 else self._only()) as merged:
            async for index, delta in merged:
                choices[index].add(delta)
        body = shape.whole(choices, self._extra(session_id))
        self._keep_messages(choices)
        return body

    def _keep_messages(self, choices: Sequence[Choice]) -> None:
        """Keep what the answers say for the call that continues them."""
        for answer, choice in zip(self._answers, choices, strict=True):
            answer.turn.said = choice.message.whole

    async def events(self, shape: AnswerFormat, session_id: str) -> AsyncGenerator[bytes, None]:
        choices = [Choice() for _ in self._answers]
        begun: set[int] = set()
        async with aclosing(self._merged()) as merged:
            async for index, delta in merged:
                if index not in begun:
                    begun.add(index)
                    if first := shape.first(index):
                        yield first
                extra = self._extra(session_id) if delta.finish_reason else {}
                event = shape.piece(index, delta, choices[index], extra)
                choices[index].add(delta)
                if event:
                    yield event
        self._keep_messages(choices)
        yield shape.last(choices, self._extra(session_id))

    async def _only(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """Yield the deltas of the one answer, whose caller ends it at a shutdown."""
        async for delta in self._answers[0].deltas:
            self._saw(delta)
            yield 0, delta

    async def _merged(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """Yield the deltas of all answers as they arrive, each with the index of its answer."""
        queue: asyncio.Queue[tuple[int, Delta] | BaseException | None] = asyncio.Queue(maxsize=64)

        async def read(index: int, answer: AnswerInProgress) -> None:
            try:
                async for delta in answer.deltas:
                    await queue.put((index, delta))
                await queue.put(None)
            except Exception as error:
                await queue.put(error)

        async def end() -> None:
            await queue.put(await self._drain())

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
                self._saw(item[1])
                yield item
        finally:
            await cancel_and_wait(*readers)

    def _saw(self, delta: Delta) -> None:
        if (delta.text or delta.token_ids) and not self._first_text_seen:
            self._first_text_seen = True
            self._metrics.first_text_seconds.observe(time.monotonic() - self._begun)

    def _extra(self, session_id: str) -> dict[str, Any]:
        """Return the fields that OpenAI's API does not define."""
        versions = sorted({v for answer in self._answers for v in answer.turn.policy_versions})
        extra: dict[str, Any] = {"policy_versions": versions}
        if session_id:
            extra |= {"session": session_id, "trajectory": self._answers[0].trajectory_id}
        return extra


def _outcome_of(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "cancelled"
    if isinstance(error, OpenAiError):
        if error.status == CLIENT_CLOSED:
            return "cancelled"
        return "refused" if error.status < 500 or error.status == 503 else "failed"
    return "failed"
