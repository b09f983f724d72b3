"""Errors of the API, each with its HTTP status; every one is answered as an ``ErrorBody``."""

from __future__ import annotations

from rollmesh.errors import RollmeshError


class ApiError(RollmeshError):
    """An error with an HTTP status; ``field`` and ``hint`` go into the answer."""

    status = 500

    def __init__(self, message: str, *, field: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.hint = hint


class BadRequest(ApiError):
    """A parameter or the body is wrong."""

    status = 400


class Unauthorized(ApiError):
    """The token is missing or wrong."""

    status = 401


class NotFound(ApiError):
    """There is no such thing in the run."""

    status = 404


class TooLarge(ApiError):
    """The body of a request is over the limit."""

    status = 413


class Busy(ApiError):
    """Too many clients, or the mesh cannot answer now: try again later."""

    status = 503
