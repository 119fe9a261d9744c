"""A little of PromQL, enough to ask what an alert says of two scrapes. Not Prometheus: an honest part of it.

`parse` takes numbers, selectors with matchers and ranges, functions, aggregations, arithmetic, comparisons and `and`;
anything else is an error, so that no expression passes unread. `evaluate` works on scrapes, (time, {series: value}).
Differences: rate is between the first and the last sample in its range and is not extrapolated to the range's ends.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

Labels = frozenset[tuple[str, str]]  # of a series, its name as "__name__"
Scrape = tuple[float, Mapping[Labels, float]]
TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?)(?![\w:])|(?P<name>[a-zA-Z_:][\w:]*)|(?P<text>\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<range>\[\d+[smh]\])|(?P<op>=~|!=|==|>=|<=|[=<>+\-*/(){},]))"
)
UNITS = {"s": 1, "m": 60, "h": 3600}
AGGREGATES = {"sum": sum, "min": min, "max": max, "count": len}
RANGED = ("rate", "increase", "deriv", "min_over_time", "max_over_time")
BINARY = (("and",), ("==", "!=", ">", "<", ">=", "<="), ("+", "-"), ("*", "/"))


class Bad(ValueError):
    """Not of the part that is understood."""


def tokens(text: str) -> list[tuple[str, str]]:
    out, at = [], 0
    text = text.rstrip()
    while at < len(text):
        m = TOKEN.match(text, at)
        if m is None:
            raise Bad(f"cannot read {text[at : at + 30]!r}")
        out.append((str(m.lastgroup), m.group(str(m.lastgroup))))
        at = m.end()
    return out


class Parser:
    def __init__(self, text: str):
        self.left = tokens(text)[::-1]

    def next(self, want: str | None = None) -> tuple[str, str]:
        if not self.left or (want is not None and self.left[-1][1] != want):
            raise Bad(f"expected {want or 'more'}, got {self.left[-1][1] if self.left else 'the end'}")
        return self.left.pop()

    def peek(self) -> str:
        return self.left[-1][1] if self.left else ""

    def binary(self, level: int = 0) -> Any:
        if level == len(BINARY):
            return self.atom()
        node = self.binary(level + 1)
        while self.peek() in BINARY[level]:
            op = self.next()[1]
            node = ("binary", op, node, self.binary(level + 1))
        return node

    def atom(self) -> Any:
        kind, text = self.next()
        if text == "(":
            node = self.binary()
            self.next(")")
            return node
        if kind == "number":
            return ("number", float(text))
        if kind != "name":
            raise Bad(f"unexpected {text}")
        if text in AGGREGATES:
            by = self.names() if self.peek() == "by" else []
            self.next("(")
            node = self.binary()
            self.next(")")
            return ("aggregate", text, by, node)
        if self.peek() == "(":
            self.next("(")
            arguments = [self.binary()]
            while self.peek() == ",":
                self.next(",")
                arguments.append(self.binary())
            self.next(")")
            if text not in (*RANGED, "histogram_quantile", "scalar"):
                raise Bad(f"no function {text}")
            return ("call", text, arguments)
        return self.selector(text)

    def names(self) -> list[str]:
        self.next("by")
        self.next("(")
        out = []
        while self.peek() != ")":
            out.append(self.next()[1])
            if self.peek() == ",":
                self.next(",")
        self.next(")")
        return out

    def selector(self, name: str) -> Any:
        matchers = []
        if self.peek() == "{":
            self.next("{")
            while self.peek() != "}":
                label, op, value = self.next()[1], self.next()[1], self.next()[1]
                if op not in ("=", "=~", "!="):
                    raise Bad(f"no matcher {op}")
                matchers.append((label, op, value[1:-1]))
                if self.peek() == ",":
                    self.next(",")
            self.next("}")
        over = None
        if self.peek().startswith("["):
            text = self.next()[1]
            over = int(text[1:-2]) * UNITS[text[-2]]
        return ("select", name, matchers, over)


def parse(text: str) -> Any:
    parser = Parser(text)
    node = parser.binary()
    if parser.left:
        raise Bad(f"what is {parser.left[-1][1]!r} doing there?")
    return node


def walk(node: Any) -> list[Any]:
    """The node and all below it."""
    below = [
        x for part in node if isinstance(part, tuple | list) for x in ([part] if isinstance(part, tuple) else part)
    ]
    return [node, *itertools.chain(*(walk(n) for n in below if isinstance(n, tuple) and n and n[0] in KINDS))]


KINDS = ("number", "binary", "aggregate", "call", "select")


def evaluate(text: str, scrapes: Sequence[Scrape]) -> Any:
    """A number, or {labels: value}, at the time of the last scrape."""
    return _value(parse(text), scrapes)


def _value(node: Any, scrapes: Sequence[Scrape]) -> Any:
    kind = node[0]
    if kind == "number":
        return node[1]
    if kind == "select":
        if node[3] is not None:
            raise Bad(f"{node[1]}[...] stands where a value is needed")
        return {labels: points[-1][1] for labels, points in _points(node, scrapes[-1:]).items()}
    if kind == "aggregate":
        groups: dict[Labels, list[float]] = {}
        for labels, v in _value(node[3], scrapes).items():
            groups.setdefault(frozenset(x for x in labels if x[0] in node[2]), []).append(v)
        return {labels: float(AGGREGATES[node[1]](vs)) for labels, vs in groups.items()}
    if kind == "call":
        return _call(node[1], node[2], scrapes)
    return _binary(node[1], _value(node[2], scrapes), _value(node[3], scrapes))


def _points(node: Any, scrapes: Sequence[Scrape]) -> dict[Labels, list[tuple[float, float]]]:
    out: dict[Labels, list[tuple[float, float]]] = {}
    for at, series in scrapes:
        for labels, v in series.items():
            have = dict(labels)
            if have["__name__"] == node[1] and all(_matches(have.get(name, ""), op, x) for name, op, x in node[2]):
                out.setdefault(labels, []).append((at, v))
    return out


def _matches(value: str, op: str, want: str) -> bool:
    if op == "=~":
        return re.fullmatch(want, value) is not None
    return (value == want) == (op == "=")


def _bare(labels: Labels) -> Labels:
    return frozenset(x for x in labels if x[0] != "__name__")


def _call(name: str, arguments: list[Any], scrapes: Sequence[Scrape]) -> Any:
    if name == "histogram_quantile":
        return _quantile(_value(arguments[0], scrapes), _value(arguments[1], scrapes))
    if name == "scalar":
        (value,) = [*_value(arguments[0], scrapes).values()] or [math.nan]
        return value
    (select,) = arguments
    if select[0] != "select" or select[3] is None:
        raise Bad(f"{name} needs a range")
    since = scrapes[-1][0] - select[3]
    out = {}
    for labels, points in _points(select, [s for s in scrapes if s[0] >= since]).items():
        if name in ("min_over_time", "max_over_time"):
            out[_bare(labels)] = (min if name.startswith("min") else max)(v for _, v in points)
        elif len(points) > 1:
            out[_bare(labels)] = _slope(points) if name == "deriv" else _rate(points) * (
                select[3] if name == "increase" else 1
            )  # fmt: skip
    return out


def _rate(points: list[tuple[float, float]]) -> float:
    """Per second; a counter that fell has begun again at 0."""
    rise = sum(b - a if b >= a else b for (_, a), (_, b) in itertools.pairwise(points))
    return rise / (points[-1][0] - points[0][0])


def _slope(points: list[tuple[float, float]]) -> float:
    """Least squares, per second."""
    n = len(points)
    t, v = sum(p[0] for p in points) / n, sum(p[1] for p in points) / n
    return sum((a - t) * (b - v) for a, b in points) / sum((a - t) ** 2 for a, _ in points)


def _quantile(q: float, buckets: dict[Labels, float]) -> dict[Labels, float]:
    """Linear within the bucket that holds it, as Prometheus has it; beyond the last bound, that bound."""
    groups: dict[Labels, list[tuple[float, float]]] = {}
    for labels, count in buckets.items():
        rest = frozenset(x for x in labels if x[0] not in ("le", "__name__"))
        groups.setdefault(rest, []).append((float(dict(labels)["le"]), count))
    out = {}
    for labels, rows in groups.items():
        rows.sort()
        rank = q * rows[-1][1]
        low = below = 0.0
        value = math.nan
        for bound, count in rows if rows[-1][1] > 0 else []:
            if count >= rank:
                value = low if bound == math.inf else low + (bound - low) * (rank - below) / max(count - below, 1e-300)
                break
            low, below = bound, count
        out[labels] = value
    return out


def _binary(op: str, a: Any, b: Any) -> Any:
    if op == "and":
        keys = {_bare(k) for k in b}
        return {k: v for k, v in a.items() if _bare(k) in keys}
    calculate = {
        "+": lambda x, y: x + y, "-": lambda x, y: x - y, "*": lambda x, y: x * y,
        "/": lambda x, y: x / y if y else math.nan if not x else math.copysign(math.inf, x),
        "==": lambda x, y: x == y, "!=": lambda x, y: x != y, ">": lambda x, y: x > y, "<": lambda x, y: x < y,
        ">=": lambda x, y: x >= y, "<=": lambda x, y: x <= y,
    }[op]  # fmt: skip
    compares = op in BINARY[1]
    if isinstance(a, float) and isinstance(b, float):
        if compares:
            raise Bad("two numbers are not compared")
        return calculate(a, b)
    if isinstance(a, float):
        a = {_bare(k): a for k in b}
    other = dict.fromkeys(map(_bare, a), b) if isinstance(b, float) else {_bare(k): v for k, v in b.items()}
    out = {}
    for labels, x in a.items():
        key = _bare(labels)
        if key in other:
            y = calculate(x, other[key])
            if not compares:
                out[key] = y
            elif y:
                out[labels] = x
    return out
