"""Bearer token check for actions (and for reads, if the run file sets gateway.token_for_reads)."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from rollmesh.runtime.api_errors import Unauthorized

Check = Callable[..., Awaitable[None]]

_SCHEME = HTTPBearer(
    scheme_name="token", description="The run's gateway token: `rollmesh status` prints it.", auto_error=False
)


def token_check(token: str) -> Check:
    """Return a dependency that raises Unauthorized unless the request carries this token."""
    expected = token.encode()

    async def check(given: Annotated[HTTPAuthorizationCredentials | None, Security(_SCHEME)]) -> None:
        # compare_digest on bytes: a header may hold any character, and the comparison takes constant time.
        if given is None or not hmac.compare_digest(given.credentials.encode(), expected):
            raise Unauthorized(
                "the token is missing" if given is None else "the token is invalid",
                field="Authorization",
                hint="send 'Authorization: Bearer TOKEN'; rollmesh status RUN_FOLDER prints the token",
            )

    return check


async def no_check() -> None:
    """Allow every read; the dependency of reads without a token."""
