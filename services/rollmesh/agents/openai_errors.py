"""Errors in OpenAI's format: message, type, parameter and code."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException

from rollmesh.errors import Conflict, DataError, RollmeshError, StoreError
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.request_guard import ApiError


class ErrorFields(BaseModel):
    """Fields of an error in OpenAI's API."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    message: str
    """Cause of the error and its remedy."""
    type: str
    """Kind of the error: invalid_request_error, authentication_error, rate_limit_error or server_error."""
    param: str | None
    """Invalid field of the request."""
    code: str | None
    """Short name of the error, for programs."""


class OpenAiErrorBody(BaseModel):
    """Body of every response below /v1 with a status of 400 or more."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    error: ErrorFields
    """The error."""


class OpenAiError(RollmeshError):
    """Error with an HTTP status and OpenAI's fields."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, round(self.retry_after)))
        return headers


def invalid(message: str, param: str | None, code: str | None = None) -> OpenAiError:
    """Make a 400: the request is invalid."""
    return OpenAiError(400, message, param=param, code=code)


def busy(message: str, code: str) -> OpenAiError:
    """Make a 409: another call is in progress. The official client retries after ``Retry-After``."""
    return OpenAiError(409, message, code=code, retry_after=1.0)


def gone(message: str, code: str) -> OpenAiError:
    """Make a 410: the session or the run has ended."""
    return OpenAiError(410, message, code=code)


def unavailable(message: str, code: str, retry_after: float = 2.0) -> OpenAiError:
    """Make a 503: the service is unavailable for now."""
    return OpenAiError(503, message, kind="server_error", code=code, retry_after=retry_after)


def too_many(message: str, code: str, retry_after: float = 2.0) -> OpenAiError:
    """Make a 429: there is no capacity for now."""
    return OpenAiError(429, message, kind="rate_limit_error", code=code, retry_after=retry_after)


def shortened(text: str) -> str:
    """Return at most 60 characters of ``text``, with an ellipsis if it is longer."""
    return text if len(text) <= 60 else f"{text[:57]}..."


def context_full(limit: str, field: str) -> OpenAiError:
    """Return the error for a context without room for an answer, in the words by which frameworks know it."""
    code = "context_length_exceeded"
    return invalid(f"This model's maximum context length is {limit} ({code})", field, code)


def not_known_yet(session: str) -> OpenAiError:
    """Make a 503: no process has the session now."""
    return unavailable(
        f"session {session}: not known yet; the service may still take over the sessions of a process that crashed or "
        "stopped, at the latest after a pause: send the same call again",
        "session_not_known_yet",
        5.0,
    )


class Elsewhere(OpenAiError):
    """The session of a request is in another replica of the service."""

    def __init__(self, session: str, forward: Callable[[Request], Coroutine[Any, Any, Response | None]]) -> None:
        """``forward`` returns the answer of the other replica; None if there is none any more."""
        super().__init__(503, f"session {session}: in another replica", code="session_not_known_yet", retry_after=1.0)
        self.forward = forward


_OTHER_TYPE = ("string_type", "int_type", "int_parsing", "list_type")
"""Errors of the branches of a union that the value does not belong to."""


class OpenAiRoute(APIRoute):
    """Route that forwards requests of other replicas' sessions, and returns every error in OpenAI's format.

    Also errors of authentication and of validation.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            try:
                try:
                    return await handle(request)
                except Elsewhere as elsewhere:
                    answer = await elsewhere.forward(request)
                    return await handle(request) if answer is None else answer
            except Exception as error:
                known = as_openai(error)
                return JSONResponse(known.body, status_code=known.status, headers=known.headers)

        return guarded


def as_openai(error: Exception) -> OpenAiError:
    """Convert any error to an OpenAiError."""
    if isinstance(error, OpenAiError):
        return error
    if isinstance(error, RequestValidationError):
        return _wrong_field(error)
    if isinstance(error, ApiError):
        kind = "authentication_error" if error.status == 401 else "invalid_request_error"
        code = "invalid_api_key" if error.status == 401 else None
        hint = f"; {error.hint}" if error.hint else ""
        return OpenAiError(error.status, f"{error}{hint}", kind=kind, param=error.field, code=code)
    if isinstance(error, HTTPException):
        return OpenAiError(error.status_code, str(error.detail))
    if isinstance(error, DataError):
        return invalid(str(error), None)
    if isinstance(error, Conflict):
        return OpenAiError(409, str(error))
    if isinstance(error, StoreError):
        return unavailable(f"the trajectory queue is unreachable: {error}", "store_unavailable")
    if isinstance(error, RollmeshError):
        return OpenAiError(502, f"the generators failed: {error}", kind="server_error", code="generation_failed")
    get_logger("openai").error("request_failed", error=repr(error), exc_info=error)
    return OpenAiError(500, "internal error of the agents service; its log has the traceback", kind="server_error")


def _wrong_field(error: RequestValidationError) -> OpenAiError:
    problems = error.errors()
    field = problems[0]["loc"][:2]
    # For a field with several possible types, the branch that the value has the type of matches it best, then the one
    # with the longest path.
    same_field = (p for p in problems if p["loc"][:2] == field)
    problem = max(same_field, key=lambda p: (p["type"] not in _OTHER_TYPE, len(p["loc"])))
    name = ".".join(str(part) for part in problem["loc"] if part != "body" and not _is_branch(part))
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        return invalid(f"{name}: unknown parameter", name, "unknown_parameter")
    if problem["type"] == "json_invalid":
        return invalid(f"the body is not valid JSON: {problem.get('ctx', {}).get('error', message)}", None)
    if problem["type"] == "missing":
        return invalid(f"{name}: required field is missing", name, "missing_required_parameter")
    if not name:
        name = message.partition(":")[0] if ":" in message else ""
        return invalid(message, name or None, "unsupported_parameter" if "not supported" in message else None)
    seen = "" if isinstance(problem.get("input"), dict | list) else f" (got {shortened(repr(problem.get('input')))})"
    return invalid(f"{name}: {message}{seen}", name)


def _is_branch(part: int | str) -> bool:
    """Tell whether a part of an error path names a branch of a union instead of a field."""
    return isinstance(part, str) and (part in ("str", "int") or not part.isidentifier())
