"""Errors in the shape that clients of OpenAI's API know: message, type, the parameter and a code."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from rollmesh.errors import RollmeshError


class ErrorFields(BaseModel):
    """The fields of an error in OpenAI's API."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    message: str
    """What is wrong, and what to do about it."""
    type: str
    """Kind of the error: invalid_request_error, authentication_error, rate_limit_error or server_error."""
    param: str | None
    """Field of the request that is wrong."""
    code: str | None
    """Short name of the error, for programs."""


class OpenAiErrorBody(BaseModel):
    """The body of every answer below /v1 with a status of 400 or more."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    error: ErrorFields
    """The error."""


class OpenAiError(RollmeshError):
    """An error with its HTTP status and OpenAI's fields."""

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
        """The answer's JSON."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """The answer's headers."""
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, round(self.retry_after)))
        return headers


def invalid(message: str, param: str | None, code: str | None = None) -> OpenAiError:
    """The request can never work."""
    return OpenAiError(400, message, param=param, code=code)


def busy(message: str, code: str) -> OpenAiError:
    """Another call has to end first; the official client tries again by itself."""
    return OpenAiError(409, message, code=code, retry_after=1.0)


def gone(message: str, code: str) -> OpenAiError:
    """The session or the run has ended."""
    return OpenAiError(410, message, code=code)


def unavailable(message: str, code: str, retry_after: float = 2.0) -> OpenAiError:
    """Not now."""
    return OpenAiError(503, message, kind="server_error", code=code, retry_after=retry_after)


def too_many(message: str, code: str, retry_after: float = 2.0) -> OpenAiError:
    """Not now, for want of room."""
    return OpenAiError(429, message, kind="rate_limit_error", code=code, retry_after=retry_after)
