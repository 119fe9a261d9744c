"""The tokens of a request without a copy of them: what a step looks up must not cost the whole context. Lesson 11."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

from minillm.request import Request


class Tokens(Sequence[int]):
    """The request's first `end` tokens, prompt and output, read in place. A slice is a list and costs its own length.

    Tokens are only ever appended to a request, so the view does not change.
    """

    __slots__ = ("_end", "_output", "_prompt")

    def __init__(self, request: Request, end: int | None = None):
        self._prompt, self._output = request.prompt_token_ids, request.output_token_ids
        self._end = request.num_tokens if end is None else end

    def __len__(self) -> int:
        return self._end

    def __getitem__(self, at: Any) -> Any:
        n = len(self._prompt)
        if isinstance(at, slice):
            start, stop, step = at.indices(self._end)
            if step != 1:
                return [self[i] for i in range(start, stop, step)]
            return self._prompt[start : min(stop, n)] + self._output[max(0, start - n) : max(0, stop - n)]
        at = operator.index(at)
        if not -self._end <= at < self._end:
            raise IndexError(f"token {at} of {self._end}")
        at %= self._end
        return self._prompt[at] if at < n else self._output[at - n]

    def __iter__(self) -> Iterator[int]:
        return islice(chain(self._prompt, self._output), self._end)
