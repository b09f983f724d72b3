"""FastAPI application of an HTTP API: routes, error bodies, token, OpenAPI document with its page, request guard."""

import hmac
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import unquote

from fastapi import APIRouter, FastAPI, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from jinja2 import ChainableUndefined, Environment, PackageLoader
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

import rollmesh
from rollmesh.errors import ConfigError, Conflict, DataError, RollmeshError, StoreError
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.request_guard import ApiError, RequestGuard, RequestMetrics, Unauthorized, error_body


def api_app(
    service: str,
    summary: str,
    prefix: str,
    routers: Sequence[APIRouter],
    metrics: RequestMetrics,
    *,
    hosts: Sequence[str] = (),
    most_bytes: int = 8 << 20,
    error_schema: str = "ErrorBody",
    further_models: Sequence[type[BaseModel]] = (),
) -> FastAPI:
    """Build the application of a service; its documentation is at ``<prefix>/docs`` and ``<prefix>/openapi.json``.

    ``error_schema`` is the schema of the response to an invalid request. ``further_models`` are described in the
    document although no route returns them.
    """
    app = FastAPI(
        title=f"rollmesh {service}",
        version=rollmesh.__version__,
        summary=summary,
        docs_url=None,
        redoc_url=None,
        openapi_url=f"{prefix}/openapi.json",
        separate_input_output_schemas=False,
    )
    for router in routers:
        app.include_router(router)

    @app.get(f"{prefix}/docs", include_in_schema=False)
    async def docs() -> Response:
        environment = Environment(
            loader=PackageLoader("rollmesh.runtime"),
            autoescape=True,
            undefined=ChainableUndefined,  # most parts of an OpenAPI document are optional
            trim_blocks=True,
            lstrip_blocks=True,
        )
        return HTMLResponse(environment.get_template("docs_page.html.j2").render(app.openapi()))

    _add_errors(app, service, prefix)
    _describe(app, error_schema, further_models)
    app.add_middleware(RequestGuard, hosts=hosts, most_bytes=most_bytes, metrics=metrics)
    app.add_middleware(PlainPaths, prefix=prefix)
    return app


def _add_errors(app: FastAPI, service: str, prefix: str) -> None:
    see_docs = f"see {prefix}/docs"

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        headers = {"WWW-Authenticate": "Bearer"} if isinstance(error, Unauthorized) else {}
        return _answer(request, error.status, str(error), error.field, error.hint, headers)

    @app.exception_handler(RequestValidationError)
    async def wrong_request(request: Request, error: RequestValidationError) -> Response:
        problem = error.errors()[0]
        if problem["type"] == "json_invalid":
            message = f"the body is not valid JSON: {problem['ctx']['error']} at character {problem['loc'][-1]}"
            return _answer(request, 400, message, "body", see_docs)
        where = [str(part) for part in problem["loc"] if part not in ("query", "path", "header", "body")]
        return _answer(request, 400, str(problem["msg"]), ".".join(where) or str(problem["loc"][0]), see_docs)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        hint = see_docs if error.status_code in (404, 405) else None
        message = f"{request.method} {request.url.path}: {error.detail}"
        headers = error.headers
        if error.status_code == 405:
            # The router lists only the methods of the first route of a path.
            path = getattr(request.scope.get("route"), "path_format", "")
            methods = {method.upper() for method in request.app.openapi()["paths"].get(path, {})}
            headers = {"Allow": ", ".join(sorted(methods)) or (headers or {}).get("Allow", "")}
        return _answer(request, error.status_code, message, None, hint, headers)

    @app.exception_handler(RollmeshError)
    async def run_error(request: Request, error: RollmeshError) -> Response:
        if isinstance(error, Conflict):
            return _answer(request, 409, str(error))
        if isinstance(error, ConfigError | DataError):
            return _answer(request, 400, str(error))
        hint = "the store is unreachable or recovering: retry in a moment" if isinstance(error, StoreError) else None
        return _answer(request, 503, str(error), None, hint)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        get_logger(service).error("request_failed", path=request.url.path, error=repr(error), exc_info=error)
        return _answer(request, 500, f"internal error of the {service} service; its log has the traceback")


def _answer(
    request: Request,
    status: int,
    error: str,
    field: str | None = None,
    hint: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    return JSONResponse(error_body(request.url.path, status, error, field, hint), status, headers)


def _describe(app: FastAPI, error_schema: str, further_models: Sequence[type[BaseModel]]) -> None:
    """Complete the OpenAPI document: 400 for invalid parameters, limits on bodies, schemas of ``further_models``."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        document = made()
        invalid = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error_schema}"}}}
        for operation in (operation for path in document["paths"].values() for operation in path.values()):
            responses = operation["responses"]
            if "HTTPValidationError" in str(responses.get("422", "")):
                del responses["422"]
                response = {"description": "A parameter or the body is invalid.", "content": invalid}
                responses.setdefault("400", response)
            if "requestBody" in operation:
                content = responses["400"]["content"]
                responses["408"] = {"description": "The body did not arrive in time.", "content": content}
                responses["413"] = {"description": "The body exceeds gateway.max_request_bytes.", "content": content}
        schemas = document["components"]["schemas"]
        for model in further_models:
            schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= {name: inner for name, inner in schema.pop("$defs", {}).items() if name not in schemas}
            schemas[model.__name__] = schema
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


Check = Callable[..., Awaitable[None]]

TOKEN_SCHEME = HTTPBearer(
    scheme_name="token", description="The run's gateway token: `rollmesh status` prints it.", auto_error=False
)


def token_check(token: str) -> Check:
    """Return a dependency that raises Unauthorized unless the request carries this token."""
    expected = token.encode()

    async def check(given: Annotated[HTTPAuthorizationCredentials | None, Security(TOKEN_SCHEME)]) -> None:
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


class PlainPaths:
    """ASGI middleware that serves ``//v1/models`` and ``/v1/models/`` as ``/v1/models``."""

    def __init__(self, app: ASGIApp, *, prefix: str) -> None:
        """Set up the middleware; it drops trailing slashes only below ``prefix``."""
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            # The path as sent: an encoded slash belongs to a parameter.
            sent = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
            plain = re.sub("/{2,}", "/", sent)
            if plain.startswith(f"{self._prefix}/"):
                plain = plain.rstrip("/")
            if plain != sent:
                scope["path"], scope["raw_path"] = unquote(plain), plain.encode("latin-1")
        await self._app(scope, receive, send)
