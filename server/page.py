"""`/`: a page to try the model on, which shows what speculation does. Static files, all from here."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

_FOLDER = Path(__file__).with_name("static")
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FILES = {
    "/": "index.html",
    "/static/style.css": "style.css",
    "/static/playground.js": "playground.js",
    "/static/stream.js": "stream.js",
    "/static/gauges.js": "gauges.js",
    "/static/chart.js": "chart.js",
    "/static/icon.svg": "icon.svg",
}
PATHS = tuple(_FILES)

# The page runs its own scripts only, and asks nobody but this server; no other site may frame it.
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def routes() -> APIRouter:
    """The page and its files, which are read once."""
    router = APIRouter(include_in_schema=False)
    for path, name in _FILES.items():
        file = _FOLDER / name
        answer = partial(_answer, file.read_bytes(), _TYPES[file.suffix])
        router.add_api_route(path, answer, methods=["GET", "HEAD"], response_class=Response)
    return router


async def _answer(content: bytes, kind: str) -> Response:
    return Response(content, media_type=f"{kind}; charset=utf-8", headers=_HEADERS)
