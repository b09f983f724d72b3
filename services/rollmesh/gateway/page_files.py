"""The files of the page, for the applications that serve it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import FileResponse, Response
from fastapi.staticfiles import StaticFiles

PAGE = Path(__file__).parent / "page"


def mount_page(app: FastAPI) -> None:
    """Serve the page at ``/`` and its files under ``/page``."""

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        # Revalidate on every load: an old page may not match the API.
        return FileResponse(PAGE / "index.html", headers={"Cache-Control": "no-cache"})

    app.mount("/page", _Static(directory=PAGE), name="page")


class _Static(StaticFiles):
    """Files of the page, revalidated on every request (a 304 response costs little for a page of this size)."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["Cache-Control"] = "no-cache"
        return response
