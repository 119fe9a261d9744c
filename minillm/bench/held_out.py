"""C = a m + b n on the real engine: fitted to some requests, then held against others. Lesson 13.

Every request runs alone and on the direct side, so its time is the machine's time that it costs: m prompt tokens, n
output tokens, seconds from sending it to the end of its stream. The fit is made before the predictions are sealed, and
what it says of other shapes is among them. Shapes vary in m and n on their own; the held-out ones lie between.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any

from minillm.bench.common import Options, random_tokens
from minillm.bench.streams import Send
from minillm.errors import MinillmError
from minillm.roofline import capacity
from minillm.roofline.quantities import SERVING_GOALS
from minillm.trace.client import Call

TIMES = 3  # of each shape that the fit sees; their median is its sample
ERROR = "cost.error"
Shape = tuple[int, int]  # prompt tokens, output tokens


def shapes(prompt: int, new: int) -> tuple[list[Shape], list[Shape]]:
    """Those of the fit, and those that it never sees: shares of the bench's own lengths, each of them once."""
    part = lambda whole, eighths: max(1, whole * eighths // 8)
    fit = [(part(prompt, p), part(new, n)) for p, n in ((1, 1), (1, 4), (8, 1), (4, 2))]
    held = [(part(prompt, p), part(new, n)) for p, n in ((2, 2), (6, 1), (4, 3), (8, 2))]
    return list(dict.fromkeys(fit)), [s for s in dict.fromkeys(held) if s not in fit]


def draw(options: Options, vocab: int, turn: str, wanted: Sequence[Shape]) -> list[Call]:
    """Fresh tokens for each shape: nothing is in a cache."""
    rng = random.Random(f"{options.seed} alone {turn}")
    return [Call(random_tokens(rng, m, vocab), n) for m, n in wanted]


async def alone(send: Send, calls: Sequence[Call]) -> list[float]:
    """Seconds of each, one after another."""
    found = []
    for call in calls:
        s = await send(call)
        if not s.ok or s.tokens != call.max_tokens:
            raise MinillmError(f"a request that ran alone is not whole: {s.error or s.status}, {s.tokens} tokens")
        found.append(s.end - s.sent)
    return found


def fit(wanted: Sequence[Shape], rounds: Sequence[Sequence[float]]) -> capacity.Cost:
    """a and b from the median of each shape. rounds: seconds, in the order of the shapes."""
    return capacity.fit([(m, n, statistics.median(each)) for (m, n), each in zip(wanted, zip(*rounds), strict=True)])


def expect(book: Any, cost: capacity.Cost, held: Sequence[Shape]) -> None:
    """Before the seal: the time of every held-out shape."""
    for m, n in held:
        book.expect(_key(m, n), "request_cost", a=cost.a, b=cost.b, m=m, n=n)


def enter(book: Any, held: Sequence[Shape], rounds: Sequence[Sequence[float]]) -> None:
    """What was measured, how far the predictions were off, and the gate."""
    for shape, samples in zip(held, zip(*rounds), strict=True):
        book.measured(_key(*shape), samples)
    error = book.derive(ERROR, "prediction_error", [_key(*shape) for shape in held])
    goal = SERVING_GOALS["cost_error"]
    detail = f"{error['median']:.1%} off in the median of {len(held)} shapes, {error['max']:.1%} at most"
    book.check(f"a m + b n is within {goal:.0%} on requests it was not fitted to", error["median"] <= goal, detail)


def _key(m: int, n: int) -> str:
    return f"alone.{m}.{n}"
