"""FastAPI application of an HTTP API: routes, error bodies, OpenAPI document with its page, and the request guard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

import rollmesh
from rollmesh.errors import ConfigError, Conflict, DataError, RollmeshError, StoreError
from rollmesh.runtime.api_errors import ApiError, Unauthorized, error_body
from rollmesh.runtime.docs_page import docs_page
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.plain_paths import PlainPaths
from rollmesh.runtime.request_guard import RequestGuard, RequestMetrics


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
        return HTMLResponse(docs_page(app.openapi()))

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
            headers = {"Allow": ", ".join(sorted(_methods(request, (headers or {}).get("Allow", ""))))}
        return _answer(request, error.status_code, message, None, hint, headers)

    @app.exception_handler(RollmeshError)
    async def run_error(request: Request, error: RollmeshError) -> Response:
        if isinstance(error, Conflict):
            return _answer(request, 409, str(error), None, None)
        if isinstance(error, ConfigError | DataError):
            return _answer(request, 400, str(error), None, None)
        hint = "the store is unreachable or recovering: retry in a moment" if isinstance(error, StoreError) else None
        return _answer(request, 503, str(error), None, hint)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        get_logger(service).error("request_failed", path=request.url.path, error=repr(error), exc_info=error)
        return _answer(request, 500, f"internal error of the {service} service; its log has the traceback", None, None)


def _methods(request: Request, first: str) -> set[str]:
    """Return the HTTP methods of all operations at the requested path; ``first`` is used if the path is unknown."""
    path = getattr(request.scope.get("route"), "path_format", "")
    operations = request.app.openapi()["paths"].get(path, {})
    return {method.upper() for method in operations} or {first}


def _answer(
    request: Request,
    status: int,
    error: str,
    field: str | None,
    hint: str | None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    body = error_body(request.url.path, status, error, field, hint)
    return JSONResponse(body, status_code=status, headers=None if headers is None else dict(headers))


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
