"""Errors of the API, each with its HTTP status; the response body is an ``ErrorBody``."""

from __future__ import annotations

from typing import Any

from rollmesh.errors import RollmeshError


class ApiError(RollmeshError):
    """Error with an HTTP status; ``field`` and ``hint`` go into the response."""

    status = 500

    def __init__(self, message: str, *, field: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.hint = hint


class BadRequest(ApiError):
    """A parameter or the body is invalid."""

    status = 400


class Unauthorized(ApiError):
    """The token is missing or invalid."""

    status = 401


class NotFound(ApiError):
    """The requested object does not exist in the run."""

    status = 404


class Busy(ApiError):
    """Too many clients, or the data is not available yet; a later retry may succeed."""

    status = 503


def error_body(path: str, status: int, error: str, field: str | None, hint: str | None) -> dict[str, Any]:
    """Return the JSON of an error: an ``ErrorBody``, or OpenAI's format for paths below ``/v1``."""
    if not path.startswith("/v1/"):
        return {"error": error, "field": field, "hint": hint}
    message = f"{error}; {hint}" if hint else error
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": field, "code": None}}
