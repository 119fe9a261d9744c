"""What a step costs, learnt from the steps themselves: C = a m + b n, and a fixed part a step. Lesson 13.

The form is `roofline.capacity.StepModel`'s: w for a step (reading the weights), a for a prompt token in it, d for a
stream in it that decodes. `minillm.events.work` says what of a step is which. `capacity.fit_steps` fits it once, to
steps that are all there, and refuses where they look alike; a server must go on learning and always have an answer.
So: least squares over recent steps, each older one counting a little less.

Where the steps so far cannot tell w from d (always one stream), the cost goes to w. A prediction for a fuller step is
then too low rather than too high: nobody is refused because of a guess.
"""

from __future__ import annotations

from collections.abc import Iterable

from minillm.roofline.capacity import StepModel

MEMORY = 128  # steps after which an observation counts 1/e
WARM = 2  # steps that are not learnt from: the first prompt and the first token pay for what happens once
ENOUGH = 8  # learnt steps before costs are told at all
RIDGE = 1e-3  # tokens squared; far below the spread of any real mix of steps


class CostFit:
    """Feed it steps, ask it for `costs()`. O(1) a step; not thread-safe."""

    def __init__(self, memory: int = MEMORY):
        self.keep = 1.0 - 1.0 / memory
        self.steps = -WARM
        self._sums = [0.0] * 10  # weight, p, d, s, pp, pd, dd, ps, ds, tokens

    def observe(self, prefill_tokens: int, decode_tokens: int, seconds: float) -> None:
        self.steps += 1
        if self.steps <= 0:
            return
        p, d, s = float(prefill_tokens), float(decode_tokens), float(seconds)
        new = (1.0, p, d, s, p * p, p * d, d * d, p * s, d * s, p + d)
        self._sums = [self.keep * old + x for old, x in zip(self._sums, new)]

    def rate(self) -> float | None:
        """Tokens a second of recent steps, whatever their kind. None until known."""
        seconds, tokens = self._sums[3], self._sums[9]
        return tokens / seconds if self.steps >= ENOUGH and seconds > 0 else None

    def costs(self) -> StepModel | None:
        """None until known. No cost is negative: one that would be is left out, and the others fitted again."""
        w, p, d, s, pp, pd, dd, ps, ds, _ = self._sums
        if self.steps < ENOUGH or s <= 0:
            return None
        p, d, s = p / w, d / w, s / w
        covariance = {"pp": pp / w - p * p + RIDGE, "pd": pd / w - p * d, "dd": dd / w - d * d + RIDGE}
        to_p, to_d = ps / w - p * s, ds / w - d * s
        fits = (self._solve(use, covariance, to_p, to_d) for use in ("pd", "p", "d", ""))
        return self._first(fits, p, d, s)

    def _solve(self, use: str, c: dict[str, float], to_p: float, to_d: float) -> tuple[float, float]:
        if use == "pd":
            det = c["pp"] * c["dd"] - c["pd"] ** 2
            if det <= 0:
                return -1.0, -1.0
            return (to_p * c["dd"] - to_d * c["pd"]) / det, (to_d * c["pp"] - to_p * c["pd"]) / det
        return (to_p / c["pp"] if use == "p" else 0.0), (to_d / c["dd"] if use == "d" else 0.0)

    def _first(self, fits: Iterable[tuple[float, float]], p: float, d: float, s: float) -> StepModel | None:
        for a, b in fits:
            if a >= 0 and b >= 0:
                base = s - a * p - b * d
                if base >= 0:
                    return StepModel(base, a, b)
        return None
