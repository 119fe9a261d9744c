"""Every HTTP request is counted, whoever answers it: by its route's template and the status that was sent. Lesson 13.

A status that was sent is a fact about the wire. What goes wrong later in a stream has no status any more: it is in
`minillm:request_errors` (failures.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minillm.server.errors import GONE


class Counted:
    """Around an ASGI application: count(route, method, status, seconds) at the end of each request.

    route: the template ("/v1/models/{name:path}"), None for what has no route. seconds: until the application is done.
    """

    def __init__(self, app: ASGIApp, count: Callable[[str | None, str, int, float], None]):
        self.app, self.count = app, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin, status = time.perf_counter(), None

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start" and status is None:  # a second is refused, not sent
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noted)
        except Exception:
            status = status or 500  # what uvicorn then sends
            raise
        finally:
            seconds = time.perf_counter() - begin
            self.count(template(scope), scope["method"], GONE if status is None else status, seconds)


def template(scope: Scope) -> str | None:
    """Of the route that took this request, after the application has seen it. None: no route did."""
    path: str | None = getattr(scope.get("route"), "path", None)
    if path is not None:
        return path
    # Starlette's own routes leave no trace of themselves but this. Without parameters the path is the template.
    return scope["path"] if "endpoint" in scope and not scope.get("path_params") else None
