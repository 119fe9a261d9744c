"""Labels of metrics that stay few, whoever chooses their values: names, and classes of prompts. Lesson 13."""

from __future__ import annotations

from minillm.trace.latency import BOUNDS

OTHER = "other"


def length_bucket(prompt_tokens: int) -> str:
    """Which class of prompt a request is: "le_128", ..., "gt_32768". BOUNDS are the upper ends, themselves inside."""
    return next((f"le_{n}" for n in BOUNDS if prompt_tokens <= n), f"gt_{BOUNDS[-1]}")


class Names:
    """Values of a label that strangers choose: the first `limit` keep their name, all later ones are "other"."""

    def __init__(self, limit: int, empty: str = "none"):
        self.limit, self.empty = limit, empty
        self._known: set[str] = set()

    def __call__(self, name: object) -> str:
        text = str(name)[:64].encode("utf-8", "replace").decode() if name not in (None, "") else self.empty
        if text not in self._known:
            if len(self._known) >= self.limit:
                return OTHER
            self._known.add(text)
        return text
