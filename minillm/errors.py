"""Errors that a person is meant to read.

Every message says what was given, what was expected and what to do next. The command line prints
it on one line and exits with code 2; Python callers catch `MinillmError` or plain `ValueError`.
"""


class MinillmError(ValueError):
    """Bad input, a broken folder, a missing model: something the caller can fix."""


class RequestError(MinillmError):
    """A request that cannot be honoured. `field` names the parameter that is at fault."""

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field


class EngineLost(MinillmError):
    """The engine as a whole cannot go on: not a request's fault, and none can be served any more."""
