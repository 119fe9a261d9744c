"""Text streams to check against: an incremental detokenizer, stop strings, and scenarios that drive an answer.

The wrong ones of exercise 03 are the same classes with a flag changed. Tooling of lesson 03.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minillm.course.tasks import Wrong

# 03.7 the incremental detokenizer


class Detokenizer:
    """`keep` and the rest make the wrong ones: hold "one" last U+FFFD, "all" text before it too, or "none"."""

    hold, alone, strip, lose = "one", False, False, False

    def __init__(self, decode: Callable[[list[int]], str]):
        self.decode, self.tokens, self.sent = decode, list[int](), 0

    def append(self, token: int) -> str:
        self.tokens = [token] if self.alone else [*self.tokens, token]
        text = self.decode(self.tokens)
        if self.alone:
            return text
        end = len(text)
        if text.endswith("\ufffd") and self.hold != "none":
            end = end - 1 if self.hold == "one" else self.sent
        delta, self.sent = text[self.sent : end], end
        if self.sent == len(text) and not text.endswith("\ufffd"):
            self.tokens, self.sent = [], 0
        return delta.replace("\ufffd", "") if self.strip else delta

    def finish(self) -> str:
        return "" if self.lose or self.alone else self.decode(self.tokens)[self.sent :]


def stream(function: Any, pieces: Sequence[bytes]) -> dict[str, Any]:
    """Token i stands for pieces[i]."""
    d = function(lambda ids: b"".join(pieces[i] for i in ids).decode("utf-8", "replace"))
    deltas = [d.append(i) for i in range(len(pieces))]
    return {"deltas": deltas, "finish": d.finish()}


def stream_long(function: Any, pieces: Sequence[bytes], times: int) -> str:
    most = 0

    def decode(ids: list[int]) -> str:
        nonlocal most
        most = max(most, len(ids))
        return b"".join(pieces[i] for i in ids).decode("utf-8", "replace")

    d = function(decode)
    text = "".join([d.append(i) for _ in range(times) for i in range(len(pieces))]) + d.finish()
    if most > 16:
        raise Wrong(
            f"after {times * len(pieces)} tokens one call decoded {most} of them",
            "forget the tokens whose text is out: decoding everything at every step costs O(T^2)",
        )
    return text


def variant(**flags: Any) -> Any:
    return type("Detokenizer", (Detokenizer,), flags)


# 03.8 stop strings


class StopStrings:
    """`choose`: which stop wins, by ("end", "start" or "list"); the flags make the other wrong ones."""

    choose, leak, lose, piecewise, greedy_hold, flush = "end", False, False, False, False, False

    def __init__(self, stop: list[str], include_stop: bool):
        self.stop, self.include = stop, include_stop
        self.matched: str | None = None
        self.held, self.shown = "", 0

    def feed(self, text: str) -> str:
        if self.matched is not None:
            return ""
        text = text if self.piecewise else self.held + text
        found = [(text.find(s), s) for s in self.stop if s in text]
        if found:
            rank: dict[str, Callable[[Any], Any]] = {
                "end": lambda f: (f[0] + len(f[1]), -len(f[1])), "start": lambda f: f[0],
                "short": lambda f: (f[0] + len(f[1]), len(f[1])), "list": lambda f: self.stop.index(f[1]),
            }  # fmt: skip
            start, self.matched = match = min(found, key=rank[self.choose])
            end = start + len(match[1]) if self.include else start
            shown, self.held = text[self.shown : end], ""
            return shown
        if self.leak:
            delta, self.held, self.shown = text[self.shown :], text, len(text)
            return delta
        if self.piecewise:
            return text
        keep = max(n for s in self.stop for n in range(len(s)) if text.endswith(s[:n]))
        if self.greedy_hold:
            keep = min(max(map(len, self.stop)) - 1, len(text))
        if self.flush and not any(s.startswith(text) for s in self.stop):
            keep = 0
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        shown, self.held = self.held, ""
        return "" if self.lose or self.leak else shown


def filtered(function: Any, pieces: list[str], stop: list[str], include_stop: bool = False) -> dict[str, Any]:
    s = function(list(stop), include_stop)
    deltas = [s.feed(piece) for piece in pieces]
    return {"deltas": deltas, "finish": s.finish(), "matched": s.matched}


def several(function: Any, inputs: Sequence[Any]) -> list[Any]:
    return [filtered(function, *one) for one in inputs]


def whole_text(function: Any, pieces: list[str], stop: list[str]) -> dict[str, Any]:
    """With include_stop an answer may hold text back or not: only the whole counts."""
    got = filtered(function, pieces, stop, True)
    return {"text": "".join(got["deltas"]) + got["finish"], "matched": got["matched"]}


def stops(**flags: Any) -> Any:
    return type("StopStrings", (StopStrings,), flags)
