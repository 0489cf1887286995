"""Serving below a path, behind a proxy that may or may not take that path off."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """ASGI middleware, the outermost one: everybody behind it, the key check above all, sees plain paths."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            inside: str = scope["path"]
            # As often as it stands there: the router would take it off once more, behind the key check.
            while f"{inside}/".startswith(f"{self._root}/"):
                inside = inside[len(self._root) :]
            scope = {**scope, "path": inside or "/", "root_path": self._root}  # for links, as in /docs
        await self._app(scope, receive, send)
