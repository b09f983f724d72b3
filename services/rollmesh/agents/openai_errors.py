"""Errors in OpenAI's format: message, type, parameter and code."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from rollmesh.errors import RollmeshError


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
        """JSON body of the response."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response."""
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
