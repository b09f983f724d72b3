"""Verifier that asks a judge or reward model over HTTP."""

import asyncio
import json
import math
import os
import re
from collections.abc import Mapping
from typing import Any, Literal

import httpx

from rollmesh.errors import ConfigError, VerifierError
from rollmesh.runtime.tasks import Backoff
from rollmesh.tasks.verifiers.extraction import last_match, last_number, number_text
from rollmesh.tasks.verifiers.verifier_protocol import RewardParts

LARGEST_REPLY_BYTES = 1 << 20
_BACKOFF = Backoff(first_seconds=0.2, longest_seconds=5.0, jitter=0.5)
_FIELD = re.compile(r"\{(\w+)\}")
_THOUGHT_TAG = re.compile(r"[<\[\u25c1](/?)(?:\w+:)?think(?:ing)?[>\]\u25b7]", re.IGNORECASE)
_CUT_OFF = re.compile("length|max|limit|filter|safety|abort|error", re.IGNORECASE)
"""Reasons for the end of a reply without its last words, as servers call them."""
_DENOMINATOR = re.compile(r"\s*(?:/|\bout of\b)\s*[0-9]+(?:\.[0-9]+)?", re.IGNORECASE)


class HttpJudgeVerifier:
    """Client of a judge: posts each answer and reads a number from the reply.

    ``format: score`` posts ``{"prompt", "response", "metadata"}`` and expects ``{"score": number, "parts": {...}}``.
    ``format: chat`` calls an OpenAI-compatible ``/chat/completions`` endpoint: ``template`` is filled with {prompt},
    {response} and the fields of the row's metadata, such as {answer}, and ``score_pattern`` finds the number in the
    model's reply (its last match, group 1). Without a pattern the last number counts; for ``8/10`` or ``8 out of 10``
    that is 8. Only what follows the judge's thought counts (``</think>``, ``[/THINK]``); a reply that was cut off is an
    error. Connection errors, replies that cannot be decompressed and the replies 408, 425, 429 and 5xx are retried,
    within ``timeout_seconds`` overall.
    """

    timeout_means_wrong = False
    needs_prompt = True

    def __init__(
        self,
        url: str,
        format: Literal["score", "chat"] = "score",
        timeout_seconds: float = 30.0,
        retries: int = 3,
        scale: float = 1.0,
        headers: Mapping[str, str] | None = None,
        api_key_env: str | None = None,
        model: str = "",
        template: str = "",
        score_pattern: str = "",
        temperature: float | None = 0.0,
        max_tokens: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        concurrency: int = 64,
    ) -> None:
        """Create a client; ``scale`` multiplies the number, and ``api_key_env`` names the variable of a bearer token.

        ``temperature``, ``max_tokens`` and ``chat_template_kwargs``, for example {enable_thinking: false}, are sent to
        a chat model; null leaves one out, for judges that refuse it. Raises ConfigError with the invalid option.
        """
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"reward.options.url: {url!r} must begin with http:// or https://")
        if format == "chat" and (not model or "{response}" not in template):
            raise ConfigError("reward.options: format=chat needs model, and a template that contains {response}")
        if not timeout_seconds > 0 or retries < 0 or concurrency < 1 or not math.isfinite(scale):
            raise ConfigError(
                f"reward.options: timeout_seconds={timeout_seconds} (> 0), retries={retries} (>= 0), "
                f"concurrency={concurrency} (>= 1), scale={scale} (finite)"
            )
        sampling = {"temperature": temperature, "max_tokens": max_tokens, "chat_template_kwargs": chat_template_kwargs}
        self._url = url
        self._chat = format == "chat"
        self._timeout_seconds = timeout_seconds
        self._attempts = retries + 1
        self._scale = scale
        self._request = {"model": model, **{name: value for name, value in sampling.items() if value is not None}}
        self._template = template
        try:
            self._score_pattern = re.compile(score_pattern) if score_pattern else None
        except re.error as error:
            raise ConfigError(f"reward.options.score_pattern: {score_pattern!r}: {error}") from error
        if self._score_pattern is not None and self._score_pattern.groups < 1:
            raise ConfigError(f"reward.options.score_pattern: {score_pattern!r} needs a group around the number")
        self._headers = dict(headers or {})
        if api_key_env is not None:
            if api_key_env not in os.environ:
                raise ConfigError(f"reward.options.api_key_env: the environment variable {api_key_env} is not set")
            self._headers["Authorization"] = f"Bearer {os.environ[api_key_env].strip()}"
        self.concurrency = concurrency
        """Maximum number of concurrent ``verify_async`` calls."""
        self._tls = httpx.create_ssl_context()
        self._client: httpx.AsyncClient | None = None

    def verify(self, response: str, prompt_metadata: Mapping[str, Any]) -> RewardParts:
        """Score one response and block until the reply. Raises TimeoutError or VerifierError."""

        async def once() -> RewardParts:
            async with self._new_client() as client:
                return await self._judge(client, response, prompt_metadata)

        return asyncio.run(once())

    async def verify_async(self, response: str, prompt_metadata: Mapping[str, Any]) -> RewardParts:
        """Score one response over persistent connections. Raises TimeoutError or VerifierError."""
        if self._client is None:
            self._client = self._new_client()
        return await self._judge(self._client, response, prompt_metadata)

    async def aclose(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    def _new_client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=self.concurrency)
        return httpx.AsyncClient(headers=self._headers, verify=self._tls, limits=limits)

    async def _judge(self, client: httpx.AsyncClient, response: str, prompt_metadata: Mapping[str, Any]) -> RewardParts:
        prompt = str(prompt_metadata.get("prompt", ""))
        if self._chat:
            fields = {"answer": "", **prompt_metadata, "prompt": prompt, "response": response}
            # A single pass: braces inside an answer stay text.
            content = _FIELD.sub(lambda found: _text(fields.get(found[1], found[0])), self._template)
            payload = {**self._request, "messages": [{"role": "user", "content": content}]}
        else:
            rest = {name: value for name, value in prompt_metadata.items() if name != "prompt"}
            payload = {"prompt": prompt, "response": response, "metadata": rest}
        async with asyncio.timeout(self._timeout_seconds):
            for attempt in range(1, self._attempts + 1):
                reply = await self._post(client, payload, last=attempt == self._attempts)
                if isinstance(reply, bytes):
                    return self._reward(reply)
                await asyncio.sleep(max(reply, _BACKOFF.seconds(attempt)))
        raise VerifierError(f"http_judge: {self._url}: no attempt was made")

    async def _post(self, client: httpx.AsyncClient, payload: Any, *, last: bool) -> bytes | float:
        """Return the body of a successful reply, or the seconds that the server requests before the next attempt."""
        try:
            async with client.stream("POST", self._url, json=payload, timeout=self._timeout_seconds) as reply:
                body = await _read_bounded(reply)
        except httpx.TimeoutException as error:
            raise TimeoutError(f"http_judge: {self._url}: {type(error).__name__}") from error
        except httpx.RequestError as error:
            if last:
                raise VerifierError(f"http_judge: {self._url}: {type(error).__name__}: {error}") from error
            return 0.0
        if reply.is_success:
            return body
        if last or not (reply.status_code in (408, 425, 429) or reply.status_code >= 500):
            text = body[:200].decode("utf-8", "replace")
            raise VerifierError(f"http_judge: {self._url}: status {reply.status_code}: {text!r}")
        try:
            return max(0.0, float(reply.headers.get("Retry-After", "0")))
        except ValueError:  # the date form; the back-off is close enough
            return 0.0

    def _reward(self, body: bytes) -> RewardParts:
        try:
            reply = json.loads(body)
            if self._chat:
                return RewardParts(value=self._scale * self._chat_score(reply["choices"][0]))
            parts = reply.get("parts") or {}
            return RewardParts(value=self._scale * _number(reply["score"]), parts=dict(parts))
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            text = body[:200].decode("utf-8", "replace")
            raise VerifierError(
                f"http_judge: {self._url}: no score in the reply {text!r}: {type(error).__name__}: {error}"
            ) from error

    def _chat_score(self, choice: Mapping[str, Any]) -> float:
        if _CUT_OFF.search(reason := str(choice.get("finish_reason"))):
            raise ValueError(f"the reply was cut off ({reason}); raise reward.options.max_tokens or the judge's limit")
        content: str = choice["message"]["content"]
        tags = list(_THOUGHT_TAG.finditer(content))
        if tags and not tags[-1][1]:
            raise ValueError(f"the reply ends inside a thought: {content[-80:]!r}")
        text = content[tags[-1].end() :] if tags else content
        if self._score_pattern is None:
            number = last_number(_DENOMINATOR.sub("", text))
            if number is None:
                raise ValueError(f"no number in {text[:80]!r}")
            return float(number.replace(",", ""))
        if (found := last_match(self._score_pattern, text)) is None:
            raise ValueError(f"{self._score_pattern.pattern!r} does not match {text[:80]!r}")
        return float(found[1])


async def _read_bounded(reply: httpx.Response) -> bytes:
    body = bytearray()
    async for data in reply.aiter_bytes():
        body += data
        if len(body) > LARGEST_REPLY_BYTES:
            raise VerifierError(f"http_judge: {reply.url}: the reply is larger than {LARGEST_REPLY_BYTES} bytes")
    return bytes(body)


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return number_text(str(value)) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"score is {value!r}, not a number")
    return float(value)
