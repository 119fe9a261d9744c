"""From a request's tokens to its text: detokenizer, stop strings and finish reasons in one place. Lesson 03.

The engine pushes each new token and passes on the text that comes out. All deltas together are the final text.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from minillm.models.detokenizer import IncrementalDetokenizer, TextCodec
from minillm.request import Request
from minillm.stop import StopStrings, check_finish


class Detokenizer(Protocol):
    """The part that `LLM(parts={"detokenizer": ...})` replaces; `peek` is optional (see IncrementalDetokenizer)."""

    def append(self, token_ids: Iterable[int]) -> str: ...

    def finish(self) -> str: ...


class Stops(Protocol):
    """The part that `LLM(parts={"stops": ...})` replaces, called with (stop strings, include_stop) for each request.

    matched is the stop that was completed, or None. `completes`, and feed's `enabled`, are optional (see StopStrings).
    """

    matched: str | None

    def feed(self, text: str) -> str: ...

    def finish(self) -> str: ...


class OutputProcessor:
    """Drives one request. `push(token)` appends to `request.output_token_ids`, sets `finish_reason` and
    `stop_reason` when the token ends it, and returns the text that may be shown.

    The token that ends generation (EOS, or one of stop_token_ids) is in the token ids but not in the text, unless
    include_stop_str_in_output. As in vLLM, a stop string counts when the text that completes it comes after the first
    min_tokens tokens; it may begin before. If `request.logprobs` has an entry for the token, its `decoded_token`s are
    filled in.
    """

    def __init__(
        self,
        tokenizer: TextCodec,
        request: Request,
        detokenizer: Callable[[Any, Sequence[int], bool], Detokenizer] = IncrementalDetokenizer,
        stops: Callable[[Sequence[str], bool], Any] | None = None,
    ):
        p = request.params
        self.request = request
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer(tokenizer, request.prompt_token_ids, p.skip_special_tokens)
        self._stops = (stops or StopStrings)(p.stop, p.include_stop_str_in_output)
        self._can_be_told = "enabled" in inspect.signature(self._stops.feed).parameters
        self._deltas: list[str] = []

    @property
    def text(self) -> str:
        """All text released so far."""
        return "".join(self._deltas)

    def push(self, token: int) -> str:
        """Take the next token; return the text that may be shown. The last delta is complete: nothing stays held."""
        r = self.request
        r.output_token_ids.append(token)
        self._name_logprobs()
        ends = check_finish(r)
        by_token = ends is not None and ends[0] == "stop"
        delta = ""
        if not by_token or r.params.include_stop_str_in_output:
            delta = self._feed(self._detokenizer.append([token])) + self._feed_if_it_stops()
        if ends is not None:
            delta += self._feed(self._detokenizer.finish())
        ends = check_finish(r, self._stops.matched)
        if ends is not None:
            r.finish_reason, r.stop_reason = ends
            delta += self._stops.finish()
        self._deltas.append(delta)
        return delta

    def finish(self) -> str:
        """End here, as for a request that is cancelled: release what is held back. After the last push, "" is left."""
        delta = self._feed(self._detokenizer.finish(), counts=False) + self._stops.finish()
        self._deltas.append(delta)
        return delta

    @property
    def _stops_count(self) -> bool:
        return len(self.request.output_token_ids) > self.request.params.min_tokens

    def _feed(self, text: str, counts: bool | None = None) -> str:
        """Through the stop strings. Where a stop does not count, a part that cannot be told so is passed by."""
        counts = self._stops_count if counts is None else counts
        if self._can_be_told:
            return self._stops.feed(text, counts)
        return self._stops.feed(text) if counts else self._stops.finish() + text

    def _feed_if_it_stops(self) -> str:
        """A stop string that is complete in held-back text ends generation now, not when the text becomes final."""
        peek = getattr(self._detokenizer, "peek", None)
        completes = getattr(self._stops, "completes", None)
        if self.request.params.stop and self._stops_count and peek and completes is not None and completes(peek()):
            return self._feed(self._detokenizer.finish())
        return ""

    def _name_logprobs(self) -> None:
        r = self.request
        if len(r.logprobs) == len(r.output_token_ids):
            for entry in r.logprobs[-1].values():
                entry.decoded_token = self._tokenizer.decode([entry.token_id], False)
