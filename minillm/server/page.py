"""A page to chat with, and to watch the scheduler while it answers. Lesson 13.

The page is three files, no build step, nothing from another host (the content security policy forbids it). It uses the
server as any client does: /v1/chat/completions with SSE, and /timeline for what the steps computed.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import WithJsonSchema

from minillm.events import Event
from minillm.server.errors import ApiError
from minillm.server.http import to_json
from minillm.server.reply_schema import TIMELINE, documented
from minillm.server.state import State

MAX_STEPS = 2048  # kept
MAX_SENT = 512  # in one reply, the newest
COUNTS = ("waiting", "running", "free", "cached", "live")  # requests, and blocks of KV
Since = Annotated[str, WithJsonSchema({"type": "string", "pattern": "^[0-9]{1,15}$"})]  # the number of a step
STATIC = Path(__file__).parent / "static"
FILES = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache",
}  # fmt: skip


class Timeline:
    """The last steps, by `EventLog.subscribe(timeline.follow)`; and whose request each was, while somebody may ask."""

    def __init__(self, max_steps: int = MAX_STEPS):
        self._steps: deque[tuple[int, Event]] = deque(maxlen=max_steps)
        self._tenants: dict[str, str] = {}
        self._last_step: dict[str, int] = {}
        self._number = 0

    def follow(self, event: Event) -> None:
        if event.kind == "queued":
            self._tenants[event.request_id] = event.data.get("tenant", "")
            self._last_step[event.request_id] = self._number
        elif event.kind == "step":
            self._number += 1
            self._steps.append((self._number, event))
            for name, *_ in event.data["rows"]:
                self._last_step[name] = self._number
            if self._number % 256 == 0:  # whoever is in no step that is kept is forgotten
                oldest = self._number - (self._steps.maxlen or 0)
                for name in [n for n, last in self._last_step.items() if last < oldest]:
                    del self._last_step[name]
                    self._tenants.pop(name, None)

    def since(self, number: int, tenant: str | None = None) -> dict[str, Any]:
        """Steps after this number. tenant: who asks; None for who may see everything.

        A tenant sees the steps that computed something of its own. Of others it sees how many were in them, and no row:
        that would give away how long their prompts are, and what of them is cached.
        """
        if number > self._number:  # it was counted by a server that has been restarted since
            number = 0
        found = [(n, e, self._rows(e, tenant)) for n, e in list(self._steps) if n > number]
        shown = [x for x in found if tenant is None or x[2]][-MAX_SENT:]
        return {
            "next": found[-1][0] if found else number,
            "steps": [
                {
                    "number": n, "time": e.time, "seconds": e.data["seconds"], "rows": rows,
                    "others": len(e.data["rows"]) - len(rows),
                    **{key: e.data[key] for key in (COUNTS if tenant is None else COUNTS[:2]) if key in e.data},
                }
                for n, e, rows in shown
            ],
        }  # fmt: skip

    def _rows(self, event: Event, tenant: str | None) -> list[list[Any]]:
        return [[*row] for row in event.data["rows"] if tenant is None or self._tenants.get(row[0]) == tenant]


def add_page(app: FastAPI, state: State) -> Timeline:
    timeline = Timeline()

    def file(path: str) -> Any:
        name, kind = FILES[path]
        content = (STATIC / name).read_bytes()

        async def send() -> Response:
            return Response(content, media_type=f"{kind}; charset=utf-8", headers=HEADERS)

        return send

    for path in FILES if state.config.role != "prefill" else ():  # which answers nobody's messages
        app.add_api_route(path, file(path), include_in_schema=False, response_class=Response)

    @app.get("/timeline", summary="What the latest steps computed.", **documented(TIMELINE, 400, 401))
    def steps(request: Request, since: Since = "0") -> Response:  # not async: made and encoded in a thread
        """A tenant sees its own requests, and that there are others."""
        tenant = state.tenants.authenticate(request.headers.get("authorization"))
        if not (since.isascii() and since.isdigit() and len(since) < 16):
            raise ApiError(400, f"since: expected a whole number, got {since[:40]!r}", param="since")
        everybody = not state.tenants.has_keys or tenant.admin
        shown = timeline.since(int(since), None if everybody else tenant.name)
        return Response(to_json(shown), media_type="application/json")

    return timeline
