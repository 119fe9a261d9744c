"""What a client is told when something is wrong: OpenAI's error body, with the field named. Lesson 13.

Every fault that reaches a client is an `ApiError`. One table says which status is which type, so that clients (which
retry on 408, 409, 429 and 5xx) can decide from the status alone.
"""

from __future__ import annotations

import math
import traceback
from typing import Any

from minillm.errors import MinillmError, RequestError

GONE = 499  # nginx's number for a client that left before its answer; nobody receives it
FRAMES = 6  # of a traceback in the log, the innermost
TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "timeout_error", 409: "conflict_error", 413: "invalid_request_error",
    415: "invalid_request_error", 429: "rate_limit_error", 500: "server_error", 503: "overloaded_error",
    504: "timeout_error",
}  # fmt: skip


class ApiError(Exception):
    """status: HTTP's. param: the field at fault. code: for programs, such as "queue_full".

    retry_after_s: seconds after which trying again makes sense; whole seconds go into the Retry-After header.
    """

    def __init__(
        self, status: int, message: str, *, type: str | None = None, param: str | None = None, code: str | None = None,
        retry_after_s: float | None = None,
    ):  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.type = type or TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}


def as_api_error(error: BaseException) -> ApiError:
    """The engine's own errors in HTTP's words. What is nobody's input is 500, without its details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.field)
    if isinstance(error, MinillmError):
        return ApiError(400, str(error))
    return ApiError(500, f"the server failed ({type(error).__name__}); the fault is in its log", code="internal_error")


def without_text(error: BaseException) -> str:
    """An exception for the log: its type, what it came from, and where in the code. Not its message, which may hold a
    user's text: what a tokenizer or a learner's part says is not ours to know."""
    while (cause := error.__cause__) is not None:
        error = cause
    return f"{type(error).__name__}\n{''.join(traceback.format_tb(error.__traceback__, limit=-FRAMES))}".rstrip()
