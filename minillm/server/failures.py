"""What kind of failure ended a request: the label of `minillm:request_errors`. And what is none. Lesson 13.

kind           what it is
timeout        a deadline or a time limit passed
out_of_memory  the device, or the KV pool, could not hold it
tool           tools were asked for, or a tool call could not be served
format         the request was malformed, or asked for what cannot be honoured
auth           the key is missing or wrong, or does not allow it
client_gone    the client closed the connection before the end
shutdown       the server was told to end before the answer had
engine         anything else: a fault of this server

Status and type decide, not words: a message may quote what a client wrote.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

from minillm.errors import RequestError
from minillm.server.errors import ApiError

KINDS = ("timeout", "out_of_memory", "tool", "format", "auth", "client_gone", "shutdown", "engine")
TOOL_FIELDS = ("tools", "tool_choice", "functions", "function_call", "parallel_tool_calls")
# How the messages of CUDA, of torch's CPU allocator and of the KV cache begin. What a client wrote begins none.
MEMORY = re.compile(
    r"(\w*Error: )?(CUDA (error: )?out of memory|\[enforce fail at alloc_cpu|"
    r"(its \d+ tokens|\d+ requests may) need \d+ blocks of KV cache)"
)
TIMEOUTS = (408, 504)
CODES = {
    "deadline_exceeded": "timeout", "request_timeout": "timeout", "invalid_api_key": "auth", "no_admin_key": "auth",
    "admin_key_needed": "auth", "priority_not_allowed": "auth", "engine_dead": "engine", "internal_error": "engine",
    "shutting_down": "shutdown",
}  # fmt: skip


def turned_away(error: BaseException | str) -> bool:
    """Whether this is no failure: a healthy server has sent the client elsewhere, or told it to come later."""
    if not isinstance(error, ApiError):
        return False
    return error.status == 429 or (error.status == 503 and error.code not in CODES)


def failure_kind(error: BaseException | str) -> str:
    """The kind of an exception, by itself or by what caused it; one that says nothing is the engine's.

    Or of a word: a kind, the code of an error body, or a status. An unknown one says what was wrong with a request.
    """
    if isinstance(error, str):
        if error.isascii() and error.isdigit():
            return _status(int(error)) or "engine"
        return error if error in KINDS else CODES.get(error, "format")
    for e in _causes(error):
        kind = _kind(e)
        if kind is not None:
            return kind
    return "engine"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _kind(e: BaseException) -> str | None:
    if isinstance(e, ApiError) and e.status >= 500:
        return CODES.get(e.code or "") or _status(e.status)
    if isinstance(e, ApiError | RequestError):
        field = (e.field if isinstance(e, RequestError) else e.param) or ""
        tool = field.split("[")[0].split(".")[0] in TOOL_FIELDS
        return "tool" if tool else _status(e.status) if isinstance(e, ApiError) else "format"
    if isinstance(e, TimeoutError):
        return "timeout"
    if isinstance(e, asyncio.CancelledError | ConnectionError) or type(e).__name__ == "ClientDisconnect":
        return "client_gone"
    if isinstance(e, MemoryError) or type(e).__name__ == "OutOfMemoryError" or MEMORY.match(str(e)):
        return "out_of_memory"
    return None


def _status(status: int) -> str | None:
    if status in TIMEOUTS:
        return "timeout"
    if status in (401, 403):
        return "auth"
    return "format" if status < 500 else None
