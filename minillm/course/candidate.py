"""An answer as the checks see it: something to call, wherever it really runs.

`Candidate` sends every call through a transport: in a notebook straight to a `Host` in this process, under `minillm
grade` to a sandboxed one (`minillm.course.session`). Results are always copies of plain data, or proxies of objects
that stay where they are, so a result that overloads `==` gains nothing. Tooling of all lessons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from minillm.course import wire
from minillm.course.host import Host


class CandidateError(Exception):
    """The answer raised, vanished, or returned what cannot be read. The text is meant for the learner."""


class NotAttempted(CandidateError):
    """The answer is still the stub of the exercise (or raised NotImplementedError itself)."""


class OverTimeError(CandidateError):
    """The answer did not come back in time."""


class Transport(Protocol):
    def request(
        self, target: Any, attr: str | None, args: list[Any] | None, limit: float, functions: list[Any],
        gaps: dict[str, int] | None = None, only: list[str] | None = None,
    ) -> Any:  # fmt: skip
        """Perform `Host.call` where the answer lives; `functions[i]` serves callback i."""


class LocalTransport:
    """Runs the answer in this process: the check cells of a notebook."""

    def __init__(self, function: Any):
        self.host = Host(wire, self._callback, watch=_watch, world=_world)
        self.functions: list[Any] = []
        self.root = self.host.keep(function)

    def _callback(self, number: int, args: list[Any]) -> Any:
        return self.functions[number](*args)

    def request(
        self, target: Any, attr: str | None, args: list[Any] | None, limit: float, functions: list[Any],
        gaps: dict[str, int] | None = None, only: list[str] | None = None,
    ) -> Any:  # fmt: skip
        self.functions = functions
        return self.host.call(target, attr, args, limit, gaps, only)


def _watch() -> Any:
    from minillm.course.kernel_watch import Watch  # Triton takes a second to import, and few lessons need it

    return Watch()


def _world(function: Any, args: Any, only: Any) -> Any:
    from minillm.course.ranks import run  # needs torch, which most lessons' checks do without

    return run(function, args, only)


class Candidate:
    """Calls look like those of a plain function or class: `candidate(x)`, `candidate(4).allocate(2)`."""

    def __init__(self, transport: Transport, root: Any, limit_s: float, reference: bool = False):
        self._transport, self._root, self._limit = transport, root, limit_s
        self.reference = reference  # this is the task's own reference or one of its mistakes, and not an answer
        self.touched: dict[str, int] = {}  # what the kernels of the last `watched` call did: `Watch.record`
        self.said: list[list[list[Any]]] = []  # what each rank of the last `on_ranks` said: `ranks.run`
        self.changed: list[str] = []  # arguments that a call wrote into
        self.after: list[Any] = []  # the arguments of the last call as they were after it
        self._functions: list[Any] = []  # callbacks by number; an object may keep one and call it much later

    def __call__(self, *args: Any) -> Any:
        return self._request(self._root, None, args)

    def watched(self, *args: Any, gaps: dict[int, int] | None = None) -> Any:
        """Call with guards around each tensor (and `gaps[i]` of them after each row of argument i); see `touched`."""
        return self._request(self._root, None, args, {str(i): n for i, n in (gaps or {}).items()})

    def on_ranks(self, args: Sequence[Sequence[Any]], only: Sequence[str]) -> list[Any]:
        """Call on all ranks of a world, `answer(group, *args[rank])`; what each returned. See `said`.

        only: the methods that the group has there.
        """
        return list(self._request(self._root, None, tuple(list(a) for a in args), only=list(only)))

    def _request(
        self, target: int, attr: str | None, args: tuple[Any, ...] | None, gaps: dict[str, int] | None = None,
        only: list[str] | None = None,
    ) -> Any:  # fmt: skip
        functions = self._functions

        def keep(value: Any) -> int:
            if not callable(value):
                raise wire.WireError(f"a check may not pass a {type(value).__name__}")
            functions.append(value)
            return len(functions) - 1

        encoded = None if args is None else [self._argument(a, keep) for a in args]
        reply = self._transport.request(target, attr, encoded, self._limit, functions, gaps, only)
        if "error" in reply:
            raise _error(reply, self._limit)
        try:
            if args is not None:
                written = {int(i): self._decode(value) for i, value in reply["changed"]}
                self.changed += [f"argument {i + 1}" if only is None else f"of rank {i}" for i in written]
                self.after = [written.get(i, a) for i, a in enumerate(args)]
            if gaps is not None:
                self.touched = {str(key): int(n) for key, n in reply["touched"].items()}
            if only is not None:
                self.said = [[[str(k), int(p), int(n), int(b)] for k, p, n, b in rank] for rank in reply["said"]]
            return self._decode(reply["ok"])
        except (AttributeError, wire.WireError, KeyError, TypeError, ValueError) as error:
            raise CandidateError(f"the result cannot be read: {error}") from None

    def _decode(self, data: Any) -> Any:
        return wire.decode(data, lambda i, name: Proxy(self, i, name))

    def _argument(self, value: Any, keep: Callable[[Any], int]) -> Any:
        if isinstance(value, Proxy):
            return {"$": "handle", "id": value._id, "type": value._type}
        data = wire.encode(value, keep)
        return _as_callback(data)


def local(function: Any, limit_s: float = 60.0, reference: bool = False) -> Candidate:
    """`function` as a candidate that runs in this process."""
    transport = LocalTransport(function)
    return Candidate(transport, transport.root, limit_s, reference)


def _as_callback(data: Any) -> Any:
    """Functions in arguments travel as callbacks (the encoder calls whatever it keeps a handle)."""
    if isinstance(data, dict):
        if data["$"] == "handle":
            return {"$": "callback", "id": data["id"], "type": "function"}
        if isinstance(data.get("v"), list):
            return {**data, "v": _as_callback(data["v"])}
    return [_as_callback(x) for x in data] if isinstance(data, list) else data


class Proxy:
    """An object of the submission. Attributes, calls, length, items and iteration are forwarded to it."""

    def __init__(self, candidate: Candidate, number: int, type_name: str):
        self._candidate, self._id, self._type = candidate, number, type_name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._candidate._request(self._id, name, None)

    def __call__(self, *args: Any) -> Any:
        return self._candidate._request(self._id, None, args)

    def __len__(self) -> int:
        try:
            return int(self._candidate._request(self._id, "__len__", ()))
        except CandidateError as error:
            raise TypeError(str(error)) from None  # what `list()` expects of an object without a length

    def __getitem__(self, key: Any) -> Any:
        return self._candidate._request(self._id, "__getitem__", (key,))

    def __iter__(self) -> Iterator[Any]:
        iterator = self._candidate._request(self._id, "__iter__", ())
        for _ in range(100_000):
            try:
                yield self._candidate._request(iterator._id, "__next__", ())
            except CandidateError as error:
                if str(error).startswith("it raised StopIteration"):
                    return
                raise
        raise CandidateError("it goes on yielding after 100,000 items")

    def __repr__(self) -> str:
        return f"<{self._type}>"


def _error(reply: dict[str, Any], limit: float) -> CandidateError:
    name, message, where = (str(reply.get(key, "")) for key in ("error", "message", "where"))
    at = f" at {where}" if where else ""
    if name == "NotImplementedError":
        return NotAttempted("not attempted")
    if name == "OverTime":
        return OverTimeError(f"it did not come back within {limit:g} s{at}; is there a loop that never ends?")
    if name in ("Gone", "RanksStuck"):
        return CandidateError(message)
    if name == "OutOfBounds":
        return CandidateError(f"out of bounds: {message} ({where})" if where else f"out of bounds: {message}")
    if name == "WireError":
        return CandidateError(f"the result cannot be read: {message}")
    if name in ("SystemExit", "KeyboardInterrupt"):
        return CandidateError(f"it ended the program with {name}{at}; an answer returns its result instead")
    if name == "TypeError" and "positional argument" in message:
        return CandidateError(f"it raised TypeError: {message}; keep the signature of the task as it was given")
    return CandidateError(f"it raised {name}: {message}{at}" if message else f"it raised {name}{at}")
